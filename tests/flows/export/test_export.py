"""What is exported is what was trained: other programs load it, and its card says whence it comes."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from cairn.engines.models.folders import load_causal_lm
from cairn.engines.models.tokenizers import read_tokenizer, tokenizer_digest
from cairn.engines.training.torch.export import save_model_folder
from cairn.engines.types.errors import BadModel
from cairn.engines.weights.fingerprint import weights_checksum
from cairn.flows.cli import app
from cairn.flows.export.model import CannotExport, copy_tokenizer, export
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import StoredFile
from tests.engines.training.builders import model_folder
from tests.flows.written_runs import new_run, write_iteration
from tests.storage.builders import ENVIRONMENT
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
IDS = torch.arange(3, 13)[None]


@pytest.fixture(scope="module")
def made(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, torch.Tensor]]]:
    """A store with run `whole`, all weights trained and evaluated, and run `lora`, adapters trained; and the weights
    that the training engine of each had in the end."""
    store = str(tmp_path_factory.mktemp("store"))
    heldout = {"name": "h", "path": str(tiny_assets / "heldout.jsonl"), "rm_type": "random", "max_response_len": 6}
    weights = {}
    for name, training in (("whole", {}), ("lora", {"lora": LORA, "lr": 1e-2})):
        config = tiny_config(
            tiny_assets,
            rollout={"num_rollout": 2},
            training={"num_threads": 1, "lr": 1e-3, **training},
            checkpoint={"store_weights": False},
            eval={"eval_interval": 2, "benchmarks": [heldout]} if name == "whole" else {},
        )
        with tiny_context(store, config, name) as (run, _):
            for index in range(2):
                iteration(run, DirectSteps(run), index)
            engine: Any = run.fleet.training
            weights[name] = {
                key: value for bucket in engine.engine.export_weights(1 << 30) for key, value in bucket.items()
            }
    return store, weights


def opened(made: tuple[str, Any], name: str) -> Ledger:
    return Ledger.open(open_store(made[0]), name)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def expected_logits(made: tuple[str, Any], assets: Path, name: str) -> torch.Tensor:
    model = load_causal_lm(assets / "model", torch.float32)
    model.load_state_dict(made[1][name], strict=False)
    return logits(model)


@pytest.mark.parametrize("name", ["whole", "lora"])
def test_the_folder_loads_in_transformers_with_the_logits_that_were_trained(
    made: tuple[str, Any], tiny_assets: Path, tmp_path: Path, name: str
) -> None:
    exported = export(opened(made, name), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(loaded), expected_logits(made, tiny_assets, name))
    assert not torch.equal(logits(loaded), logits(load_causal_lm(tiny_assets / "model", torch.float32)))
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "out", tiny_assets / "model")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert exported.restored_from == "checkpoint"
    synced = opened(made, name).find(1, Step.SYNC)
    assert synced is not None
    assert exported.published == synced.values["digest"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_an_adapter_loads_in_peft_beside_the_base_model(
    made: tuple[str, Any], tiny_assets: Path, tmp_path: Path
) -> None:
    export(opened(made, "lora"), tmp_path / "out", adapter=True)
    base = load_causal_lm(tiny_assets / "model", torch.float32)
    model: Any = peft.PeftModel.from_pretrained(base, str(tmp_path / "out"))
    assert torch.allclose(logits(model), expected_logits(made, tiny_assets, "lora"), atol=1e-5)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_the_card_names_origin_digests_and_scores_as_the_ledger_and_the_files_have_them(
    made: tuple[str, Any], tmp_path: Path
) -> None:
    ledger = opened(made, "whole")
    trained, evaluated = ledger.find(1, Step.TRAIN), [c for c in ledger.commits(1) if c.step is Step.EVAL]
    assert trained is not None
    exported = export(ledger, tmp_path / "out", 1)
    card = (tmp_path / "out" / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head)["cairn"]["state_digest"] == trained.state_digest
    for value in (trained.digest, trained.state_digest, exported.tensors, ledger.terms.inputs["data"], "whole@1"):
        assert f"`{value}`" in body
    assert f"| `h` | {evaluated[0].metrics['h']:.4f} |" in body
    lines = [line.split("  ") for line in body.splitlines() if line.endswith("model.safetensors")]
    assert lines == [
        [hashlib.sha256((tmp_path / "out" / "model.safetensors").read_bytes()).hexdigest(), "model.safetensors"]
    ]


def test_a_live_run_is_exported_and_keeps_its_driver(made: tuple[str, Any], tmp_path: Path) -> None:
    owner = opened(made, "whole")
    lease = owner.acquire(takeover=True)
    files = open_store(made[0]).find("runs/whole")
    export(opened(made, "whole"), tmp_path / "out")
    lease.check()
    assert [path for path in open_store(made[0]).find("runs/whole") if "renewed" not in path] == [
        path for path in files if "renewed" not in path
    ]


@pytest.mark.parametrize(
    ("place", "options", "sentence"),
    [
        ("whole@7", [], "has no committed train step in iteration 7; its newest is 1"),
        ("whole", ["--adapter"], "has no adapter"),
        ("whole@", [], "is not RUN[@ITER]"),
        ("nobody", [], "there is no run 'nobody'"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_sentence(
    made: tuple[str, Any], tmp_path: Path, place: str, options: list[str], sentence: str
) -> None:
    done = CliRunner().invoke(app, ["export", place, str(tmp_path / "out"), "--store", made[0], *options])
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_in_use_is_left_alone_and_an_empty_one_is_filled(made: tuple[str, Any], tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine").write_text("kept")
    with pytest.raises(CannotExport, match="not empty"):
        export(opened(made, "whole"), target)
    assert [path.name for path in target.iterdir()] == ["mine"]
    (target / "mine").unlink()
    done = CliRunner().invoke(app, ["export", "whole@1", str(target), "--store", made[0], "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["iteration"] == 1
    assert (target / "config.json").is_file()


def test_damage_leaves_no_folder_behind(made: tuple[str, Any], tmp_path: Path) -> None:
    ledger = opened(made, "whole")
    saved = ledger.find(1, Step.CHECKPOINT)
    assert saved is not None
    (file,) = [output for output in saved.outputs if "parameters" in output.path]
    path = Path(made[0]) / "runs" / "whole" / file.path
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        with pytest.raises(Damaged, match="is damaged"):
            export(ledger, tmp_path / "out")
    finally:
        path.write_bytes(data)
    assert not list(tmp_path.iterdir())


def test_another_model_in_the_place_of_the_first_is_refused(
    made: tuple[str, Any], tiny_assets: Path, tmp_path: Path
) -> None:
    extra = tiny_assets / "model" / "added_tokens.json"
    extra.write_text("not what the run began with")
    try:
        with pytest.raises(BadModel, match="is not the model that run whole started from"):
            export(opened(made, "whole"), tmp_path / "out")
    finally:
        extra.unlink()


def test_config_of_generation_and_tokenizer_are_exported_as_they_were_read(tiny_assets: Path, tmp_path: Path) -> None:
    """transformers reads sampling parameters without `do_sample`, and refuses to write them."""
    base = tmp_path / "model"
    shutil.copytree(tiny_assets / "model", base)
    (base / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.6, "do_sample": false}')
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    model = load_causal_lm(base, torch.float32)
    out = tmp_path / "out"
    out.mkdir()
    save_model_folder(model, model.state_dict(), out, base)
    copy_tokenizer(base, out)
    assert (out / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    assert tokenizer_digest(read_tokenizer(out)) == tokenizer_digest(read_tokenizer(base))
    assert model.generation_config.temperature == 0.6


def exported_by_command(*arguments: object) -> dict[str, Any]:
    """In a process of its own, in which engines of any kind start."""
    command = [Path(sys.executable).with_name("cairn"), "export", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_where_no_checkpoint_is_the_weights_are_replayed_bit_for_bit(made: tuple[str, Any], tmp_path: Path) -> None:
    synced = opened(made, "whole").find(0, Step.SYNC)
    assert synced is not None
    done = exported_by_command("whole@0", tmp_path / "out", "--store", made[0])
    assert done["restored_from"] == "the initial weights, and the train steps after it"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert weights_checksum(loaded.named_parameters()) == synced.values["digest"] == done["published"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_checkpoint_of_megatron_is_exported_as_the_model_that_it_holds(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base")
    store = str(tmp_path / "store")
    ledger = new_run(store, model={"path": str(base)}, training={"engine": "megatron"}, checkpoint={"save_interval": 1})
    trained = write_iteration(ledger, 0, until=Step.CHECKPOINT)[-1]
    attempt = ledger.attempt(0, Step.CHECKPOINT)
    convert = [Path(sys.executable).with_name("cairn"), "convert", base, f"{store}/{attempt.folder}"]
    subprocess.run(convert, check=True, capture_output=True, timeout=300)
    opened_store = open_store(store)
    outputs = [
        attempt.adopt(StoredFile(path, len(data := opened_store.read(path)), hashlib.sha256(data).hexdigest()))
        for path in opened_store.find(attempt.folder)
    ]
    ledger.commit(
        iteration=0,
        step=Step.CHECKPOINT,
        shard=None,
        attempt=attempt,
        inputs={trained.name: trained.digest},
        config_digest="0" * 64,
        environment=ENVIRONMENT,
        started_at=0.0,
        outputs=outputs,
        state_digest=trained.state_digest,
    )
    exported_by_command("toy@0", tmp_path / "out", "--store", store)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(loaded), logits(load_causal_lm(base, torch.float32)))
