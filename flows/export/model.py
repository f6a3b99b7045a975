"""`export`: write the weights after an iteration as a folder that other programs load.

| the iteration has | action |
|---|---|
| stored weights, in the format of training | this process reads them |
| a checkpoint | this process reads its weights |
| neither, or they are retired | separate engines with the run's options load the newest earlier checkpoint and replay |

The run's lease is not taken and nothing is written into the ledger: a live run may be exported. The folder is written
next to its target under another name, and renamed when it is complete.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from cairn.configs.errors import BadInput
from cairn.configs.loader import from_manifest
from cairn.configs.schema.run import RunConfig
from cairn.engines.models.files import TOKENIZER_FILES, folder_digest, matching_files
from cairn.engines.models.folders import weight_files
from cairn.engines.training.megatron.folder import write_model_folder
from cairn.engines.types.errors import BadModel
from cairn.engines.weights.checksum import checksums_as, tensors_of, trained_tensors_of
from cairn.engines.weights.fingerprint import weights_checksum
from cairn.flows.driver.trust import require_model_trusted
from cairn.flows.events import Event
from cairn.flows.history.replay import read_only_context
from cairn.flows.reading.samples import benchmark_scores
from cairn.flows.text import code, table
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.records import Record
from cairn.storage.store.errors import Damaged
from cairn.storage.upkeep.retention import is_retired, newest_checkpoint
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.versions import version_of
from cairn.tasks.trainer.recovery import restore_trainer
from cairn.tasks.trainer.stored_weights import has_weights, read_weights

# The card of an exported model: where its weights come from, and how to check that.


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
    """An exported model and its origin. Digests are hexadecimal SHA-256."""

    run: str
    iteration: int
    """Iteration after which the weights were exported."""
    weight_version: int
    """Optimizer steps since the run's initial weights."""
    state_digest: str | None
    """Digest of the whole training state, from the train step's commit."""
    commit: str
    """Digest of the train step's commit."""
    restored_from: str
    """`stored weights`, `checkpoint`, or a description of the replay."""
    adapter: bool
    """Whether the export is a LoRA adapter in peft's format instead of a whole model."""
    dtype: str
    parameters: int
    tensors: str
    """`cairn.engines.weights.fingerprint.weights_checksum` of the tensors in the weight files, without layers that are
    never trained: see `cairn.engines.models.published`."""
    published: str | None
    """Digest of these weights that the iteration's sync step committed, checked against the written files; None without
    one, or for an adapter."""
    base_model: str
    """Name of the folder of the run's initial model."""
    base_digest: str
    data_digest: str | None
    files: dict[str, str]
    """Digest of every file but the card, by name."""
    scores: dict[str, float]
    """Scores of these weights, by benchmark."""
    code: str
    """Version of Cairn that committed the train step."""


def model_card(exported: Exported) -> str:
    """Return the card as a Hugging Face README.md."""
    kind = "LoRA adapter" if exported.adapter else "model"
    head = [
        "---",
        f"library_name: {'peft' if exported.adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        "tags: [reinforcement-learning, cairn]",
        # JSON is valid YAML, and quotes special characters in names.
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
                "`sha256sum --check` with these lines shows whether the files are unchanged:",
                f"```\n{sums}\n```",
                f"They come from the run if its ledger is intact (`cairn verify {exported.run}`), its train step "
                f"`{exported.iteration:06d}/train` has the digests above, and `cairn export {place} FOLDER` writes "
                "tensors with the same digest again. The state digest covers weights, optimizer and weight version; "
                "the train step's commit names the digest of every input, so the chain goes back to the prompts.",
            ]
        )
        + "\n"
    )


CARD = "README.md"
ADAPTER = "adapter"
"""Folder next to a model in which a training engine writes its adapter."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"


class CannotExport(BadInput):
    """The requested weights do not exist, or the export would overwrite something. The message is one sentence."""


def export(
    ledger: Ledger,
    target: Path,
    iteration: int | None = None,
    *,
    adapter: bool = False,
    emit: Callable[[Event], None] = lambda event: None,
) -> Exported:
    """Write the weights after an iteration, the newest trained one by default, with tokenizer and card.

    Args:
        target: a folder that does not exist or is empty.
        adapter: write the LoRA adapter alone, in peft's format; merged into the model otherwise.

    Raises:
        CannotExport: nothing was trained there, `target` is in use, or there is no adapter.
        BadModel: the run's initial model is missing, or another model is in its place.
        Damaged, Retired, ReplayDiverged: the exact weights cannot be restored.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CannotExport(f"{target} exists already and is not empty: use the name of a new folder")
    ledger.manifest.require_own("weights")
    trained = _trained(ledger, iteration)
    owner = ledger.owner(trained.iteration)
    config = from_manifest(owner.manifest.config)
    require_model_trusted(config, owner)
    if adapter and not config.training.lora.r:
        raise CannotExport(f"run {owner.run!r} trains all weights and has no adapter: leave --adapter out")
    base = Path(config.model.path)
    digest = _require_base(owner, base)
    with _renamed_to(target) as folder:
        restored_from = _write_weights(ledger, config, trained, folder, adapter, emit)
        copy_tokenizer(base, folder)
        files = [folder / ADAPTER_WEIGHTS] if adapter else weight_files(folder)
        emit(Message("Checking the written files"))
        shapes = [(tensor.numel(), str(tensor.dtype)) for _, tensor in tensors_of(files)]
        exported = Exported(
            run=ledger.run,
            iteration=trained.iteration,
            weight_version=version_of(trained),
            state_digest=trained.state_digest,
            commit=trained.digest,
            restored_from=restored_from,
            adapter=adapter,
            dtype=" and ".join(sorted({dtype.removeprefix("torch.") for _, dtype in shapes})),
            parameters=sum(count for count, _ in shapes),
            tensors=weights_checksum(tensors_of(files) if adapter else trained_tensors_of(folder, files)),
            published=None if adapter else _require_published(owner, config, trained, folder, files),
            base_model=base.name,
            base_digest=digest,
            data_digest=owner.terms.inputs.get("data"),
            files={
                str(path.relative_to(folder)): _sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()
            },
            scores=_scores(ledger, trained.iteration),
            code=ledger.terms_of(trained).code_version.package,
        )
        (folder / CARD).write_text(model_card(exported), "utf-8")
    return exported


def _trained(ledger: Ledger, iteration: int | None) -> Commit:
    """Return the train step of an iteration, or the newest one."""
    last = ledger.last_iteration()
    if iteration is None:
        newest = -1 if last is None else last
        commits = (ledger.find(index, Step.TRAIN) for index in range(newest, max(-1, newest - 2 - ledger.lag), -1))
        trained = next((commit for commit in commits if commit is not None), None)
        if trained is None:
            raise CannotExport(f"run {ledger.run!r} has not trained anything yet: its weights are the initial ones")
        return trained
    trained = ledger.find(iteration, Step.TRAIN)
    if trained is None:
        reach = "it has none" if last is None else f"its newest is {last}"
        raise CannotExport(f"run {ledger.run!r} has no committed train step in iteration {iteration}; {reach}")
    return trained


def _require_base(owner: Ledger, base: Path) -> str:
    """Return the digest of the folder of the run's initial model, from which config and tokenizer come. Raises BadModel
    unless it is the recorded one."""
    if not base.is_dir():
        raise BadModel(f"model.path of run {owner.run} is {base}, which is not on this machine: restore it there")
    recorded = owner.terms.inputs.get("model")
    digest = folder_digest(base, recorded)
    if recorded is not None and digest != recorded:
        raise BadModel(
            f"{base} is not the model that run {owner.run} started from: it has digest {digest}, not {recorded}; "
            "restore that model"
        )
    return digest


def _write_weights(
    ledger: Ledger, config: RunConfig, trained: Commit, folder: Path, adapter: bool, emit: Callable[[Event], None]
) -> str:
    """Write model or adapter into an empty folder; return where the weights came from."""
    synced = None if adapter else ledger.find(trained.iteration, Step.SYNC)
    if synced is not None and config.training.dtype == config.rollout.dtype and has_weights(ledger, synced):
        emit(Message(f"Reading the stored weights of iteration {synced.iteration}"))
        _from_stored(ledger, config, synced, folder)
        return "stored weights"
    saved = ledger.find(trained.iteration, Step.CHECKPOINT)
    if saved is not None and saved.state_digest == trained.state_digest and not is_retired(ledger, saved):
        emit(Message(f"Reading the checkpoint of iteration {saved.iteration}"))
        _from_checkpoint(ledger, config, saved, folder, adapter)
        return "checkpoint"
    before = newest_checkpoint(ledger, trained.iteration - 1)
    origin = "the initial weights" if before is None else f"the checkpoint of iteration {before.iteration}"
    emit(
        Message(
            f"Iteration {trained.iteration} has no checkpoint: starting the run's engines to replay the steps up to it"
        )
    )
    with read_only_context(ledger.owner(trained.iteration), emit, made=trained) as run, run.weights_lock:
        restore_trainer(run, trained)
        emit(Message("Writing the weights"))
        run.fleet.training.export_hf(version_of(trained), folder.absolute())
    if not any(folder.iterdir()):
        raise CannotExport(f"the training engine runs on another machine, which does not share {folder.parent}")
    _retain_one(folder, adapter)
    return f"{origin}, and the train steps after it"


def export_stored(ledger: Ledger, synced: Commit, target: Path, emit: Callable[[Event], None]) -> None:
    """Write the weights that a sync step stored, and their tokenizer, as a model folder in the run's `rollout.dtype`.

    Raises:
        BadModel: the run's initial model is missing, or another model is in its place.
        Damaged: the stored weights are not what was committed.
    """
    owner = ledger.owner(synced.iteration)
    config = from_manifest(owner.manifest.config)
    require_model_trusted(config, owner)
    _require_base(owner, Path(config.model.path))
    emit(Message(f"Reading the stored weights of iteration {synced.iteration}"))
    with _renamed_to(target) as folder:
        _from_stored(ledger, config, synced, folder)
        copy_tokenizer(Path(config.model.path), folder)


def _from_stored(ledger: Ledger, config: RunConfig, synced: Commit, folder: Path) -> None:
    write_model_folder(
        Path(config.model.path),
        read_weights(ledger, synced).items(),
        folder,
        dtype=getattr(torch, config.rollout.dtype),
        write=True,
        with_images=config.training.engine == "torch",
    )


def _from_checkpoint(ledger: Ledger, config: RunConfig, saved: Commit, folder: Path, adapter: bool) -> None:
    _require_description(ledger, saved)
    store, checkpoint, training = ledger.store, ledger.folder_of(saved), config.training
    if training.engine == "torch":
        from cairn.engines.training.torch.export import export_checkpoint

        dtype: torch.dtype = getattr(torch, training.dtype)
        base = Path(config.model.path)
        export_checkpoint(store, checkpoint, base, folder, dtype=dtype, lora=training.lora, adapter=adapter)
        return
    from cairn.engines.training.megatron.backend import backend_for

    # The patches that make Megatron run on the CPU refuse to be installed where there is a GPU.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend_for(device)  # prepares megatron-core before anything imports it
    from cairn.engines.training.megatron.convert import export_checkpoint as export_megatron

    export_megatron(store, checkpoint, Path(config.model.path), folder, dtype=training.dtype, device=device)


def _require_description(ledger: Ledger, saved: Commit) -> None:
    """Compare the checkpoint's own description, which has the digest of every other file, with the commit. Raises
    Damaged."""
    for output in saved.outputs:
        if output.path.endswith("_state.json"):
            path = f"{ledger.folder_of(saved)}/{Path(output.path).name}"
            digest = hashlib.sha256(ledger.store.read(path)).hexdigest()
            if digest != output.sha256:
                raise Damaged(f"{path} is damaged: SHA-256 {output.sha256} was committed, {digest} was read")


def _retain_one(folder: Path, adapter: bool) -> None:
    """Retain either the model or its adapter, which is next to it; delete the other."""
    adapter_folder = folder / ADAPTER
    if adapter:
        for path in folder.iterdir():
            if path != adapter_folder:
                path.unlink()
        for path in adapter_folder.iterdir():
            path.rename(folder / path.name)
    if adapter_folder.is_dir():
        shutil.rmtree(adapter_folder)


def copy_tokenizer(base: Path, folder: Path) -> None:
    """Copy the tokenizer files bit for bit, so that they are those with which the run's prompts were written."""
    for path in matching_files(base, TOKENIZER_FILES):
        copy = folder / path.relative_to(base)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def _require_published(
    owner: Ledger, config: RunConfig, trained: Commit, folder: Path, files: list[Path]
) -> str | None:
    """Return the committed digest of the weights that rollout engines received; None without one. Raises Damaged unless
    the files contain these weights."""
    synced = owner.find(trained.iteration, Step.SYNC)
    published = None if synced is None else synced.values.get("digest")
    if not isinstance(published, str):
        return None
    digests = list(checksums_as(folder, files, getattr(torch, config.rollout.dtype)))
    if published not in digests:
        raise Damaged(
            f"the written tensors have digest {digests[0]}, but {synced and synced.name} committed {published}"
        )
    return published


def _scores(ledger: Ledger, iteration: int) -> dict[str, float]:
    """Return the score of every benchmark that the run evaluated these weights on."""
    scores = benchmark_scores(ledger, from_manifest(ledger.manifest.config))
    return {name: by_place[iteration + 1] for name, by_place in scores.items() if iteration + 1 in by_place}


@contextmanager
def _renamed_to(target: Path) -> Iterator[Path]:
    """Yield an empty folder next to `target`. Rename it to `target` after the block, or remove it after an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True) as room:
        folder = Path(room) / target.name
        folder.mkdir()
        yield folder
        try:
            os.rename(folder, target)  # replaces an empty folder, and nothing else
        except OSError as error:
            raise CannotExport(f"{target} cannot be created: {error.strerror}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
