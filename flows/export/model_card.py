"""The card of an exported model: where its weights come from, and how to check that."""

import json
from collections.abc import Mapping

from cairn.flows.text.markdown import code, table
from cairn.storage.records import Record

_MODEL = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(".")
```"""
_ADAPTER = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE", dtype="auto"), ".")
```
`BASE` is the base model's folder: its digest must be the one in the table."""


class Exported(Record):
    """What was exported, and from where. Digests are hexadecimal SHA-256."""

    run: str
    iteration: int
    """The weights are those that it left."""
    weight_version: int
    """Optimizer steps since the run's initial weights."""
    state_digest: str | None
    """Of the whole training state, as the train step committed it."""
    commit: str
    """Digest of the train step's commit."""
    restored_from: str
    """`checkpoint`, or what was replayed to come there."""
    adapter: bool
    """Whether it is a LoRA adapter in peft's format, and no whole model."""
    dtype: str
    parameters: int
    tensors: str
    """`cairn.engines.weights.checksum.weights_checksum` of the tensors in the weight files, but for layers that nobody
    trains: see `cairn.engines.mtp`."""
    published: str | None
    """The digest that the iteration's sync step committed of these weights, found again in what was written; None where
    there is none, or for an adapter."""
    base_model: str
    """Name of the folder that the run began with."""
    base_digest: str
    data_digest: str | None
    files: dict[str, str]
    """Of every file but the card, by its name."""
    scores: dict[str, float]
    """Of the evaluations of these weights, by benchmark."""
    code: str
    """The version of Cairn that committed the train step."""


def model_card(exported: Exported) -> str:
    """The card as a Hugging Face README.md."""
    kind = "LoRA adapter" if exported.adapter else "model"
    head = [
        "---",
        f"library_name: {'peft' if exported.adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        "tags: [reinforcement-learning, cairn]",
        # JSON is YAML too, and quotes what a name may hold.
        f"cairn: {json.dumps(exported.model_dump(mode='json', exclude={'files', 'scores'}), sort_keys=True)}",
        "---",
    ]
    place = f"{exported.run}@{exported.iteration}"
    facts: Mapping[str, object] = {
        "run": exported.run,
        "iteration": exported.iteration,
        "weight version": exported.weight_version,
        "state digest": exported.state_digest,
        "commit of the train step": exported.commit,
        "digest of the tensors": exported.tensors,
        "digest that the sync step committed": exported.published,
        "parameters": f"{exported.parameters:,}",
        "number format": exported.dtype,
        "base model": exported.base_model,
        "digest of the base model's folder": exported.base_digest,
        "digest of the training data": exported.data_digest,
        "trained by": f"Cairn {exported.code}",
    }
    rows = [[name, code(value)] for name, value in facts.items() if value is not None]
    scores = [[code(name), f"{score:.4f}"] for name, score in sorted(exported.scores.items())]
    sums = "\n".join(f"{digest}  {name}" for name, digest in sorted(exported.files.items()))
    return (
        "\n\n".join(
            [
                "\n".join(head),
                f"# {code(place)}",
                f"A {kind} that Cairn post-trained by reinforcement learning, after iteration {exported.iteration}.",
                table(["", ""], rows),
                "## Evaluation",
                table(["benchmark", "score"], scores) if scores else "No evaluation of these weights is in the ledger.",
                "## Use",
                _ADAPTER if exported.adapter else _MODEL,
                "## Verify",
                "The files are those that were written if `sha256sum --check` says so of these lines:",
                f"```\n{sums}\n```",
                f"They are the run's if the ledger is whole (`cairn verify {exported.run}`), its train step "
                f"`{exported.iteration:06d}/train` has the digests above, and `cairn export {place} FOLDER` writes "
                "tensors of the same digest again. The state digest covers weights, optimizer and weight version; the "
                "train step's commit names the digest of every input, so the chain goes back to the prompts.",
            ]
        )
        + "\n"
    )
