"""Every version of the weights is in the ledger, whole or as the difference to the one before, and is read without a
trainer."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cairn.configs.schema.run import RunConfig
from cairn.engines.weights.checksum import folder_checksum
from cairn.engines.weights.fingerprint import weights_checksum
from cairn.flows.evaluation.models import models_of
from cairn.flows.export.model import export
from cairn.flows.iteration import iteration
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.publications import stored
from cairn.storage.opening import open_store
from cairn.storage.store.errors import Damaged
from cairn.storage.upkeep.verification import verify
from cairn.tasks.trainer.stored_weights import read_weights
from tests.local_fleet import LocalFleet
from tests.tiny_run import DirectSteps, tiny_config, tiny_context


def config_of(assets: Path, dtype: str = "bfloat16", **options: Any) -> RunConfig:
    return tiny_config(
        assets,
        rollout={"num_rollout": 6, "dtype": dtype, "rollout_max_response_len": 4},
        training={"lr": 1e-5, "num_threads": 1, "dtype": dtype},
        checkpoint={"save_interval": 3} | options,
    )


def run_to(store: str, config: RunConfig, end: int, fleet: LocalFleet | None = None) -> list[Commit]:
    with tiny_context(store, config, fleet=fleet) as (run, _):
        for index in range(end):
            iteration(run, DirectSteps(run), index)
    ledger = Ledger.open(open_store(store), "tiny")
    return [commit for index in range(end) if (commit := ledger.find(index, Step.SYNC)) is not None]


@pytest.fixture(scope="module")
def made(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Commit]]:
    store = str(tmp_path_factory.mktemp("stored"))
    return store, run_to(store, config_of(tiny_assets), 6)


def opened(made: tuple[str, list[Commit]]) -> Ledger:
    return Ledger.open(open_store(made[0]), "tiny")


def test_every_version_is_read_bit_for_bit(made: tuple[str, list[Commit]]) -> None:
    for commit in made[1]:
        tensors = read_weights(opened(made), commit)
        assert weights_checksum(tensors.items()) == commit.values["digest"]
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_versions_are_whole_with_a_checkpoint_and_differences_otherwise(made: tuple[str, list[Commit]]) -> None:
    how = [stored(commit) for commit in made[1]]
    assert [one and one.base for one in how] == [None, "000000/sync", None, "000002/sync", "000003/sync", None]
    assert [one and one.differences for one in how] == [0, 1, 0, 1, 2, 0]
    sizes = [sum(file.bytes for file in commit.outputs) for commit in made[1]]
    assert max(sizes[1], sizes[3], sizes[4]) < 0.3 * sizes[0], sizes
    assert how[4] is not None
    assert how[4].difference_bytes == sizes[3] + sizes[4]
    assert how[4].whole_bytes == sizes[2]


def test_every_version_is_exported_and_evaluated_without_a_trainer(
    made: tuple[str, list[Commit]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*args: Any) -> Any:
        raise AssertionError("engines were started")

    monkeypatch.setattr("cairn.flows.export.model.read_only_context", started)
    monkeypatch.setattr("cairn.flows.export.model._from_checkpoint", started)
    models = models_of(open_store(made[0]), "tiny@0:5", say=lambda sentence: None)
    for commit, model in zip(made[1], models, strict=True):
        exported = export(opened(made), tmp_path / str(commit.iteration), commit.iteration)
        assert (exported.restored_from, exported.dtype) == ("stored weights", "bfloat16")
        assert exported.tensors == exported.published == commit.values["digest"]
        assert folder_checksum(model.folder(), "bfloat16") == model.weights == commit.values["digest"]
        model.close()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "5", dtype="auto")
    assert weights_checksum(loaded.named_parameters()) == made[1][5].values["digest"]
    assert AutoTokenizer.from_pretrained(tmp_path / "5").get_vocab()


def test_a_checkpoint_exports_the_same_tensors(
    made: tuple[str, list[Commit]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = export(opened(made), tmp_path / "stored", 2)
    monkeypatch.setattr("cairn.flows.export.model.has_weights", lambda *args: False)
    saved = export(opened(made), tmp_path / "saved", 2)
    assert (saved.restored_from, saved.tensors, saved.published) == ("checkpoint", whole.tensors, whole.published)
    configs = [(tmp_path / name / "config.json").read_bytes() for name in ("stored", "saved")]
    assert configs[0] == configs[1]


@pytest.fixture
def copied(made: tuple[str, list[Commit]], tmp_path: Path) -> tuple[str, list[Commit]]:
    shutil.copytree(made[0], tmp_path / "copy")
    return str(tmp_path / "copy"), made[1]


def test_a_damaged_link_is_named_by_version_and_file(copied: tuple[str, list[Commit]]) -> None:
    commits, file = copied[1], Path(copied[0], "runs/tiny", copied[1][3].outputs[0].path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for commit in commits[3:5]:
        with pytest.raises(
            Damaged, match=rf"{file.name}, a part of weight version 4 of tiny \(000003/sync\), is damaged"
        ):
            read_weights(opened(copied), commit)
    assert any(file.name in fault.message for one in verify(opened(copied)) for fault in one.findings)
    file.unlink()
    with pytest.raises(Damaged, match=rf"{file.name}, a part of weight version 4 of tiny .* is missing"):
        read_weights(opened(copied), commits[4])
    for commit in (*commits[:3], commits[5]):
        read_weights(opened(copied), commit)


def test_a_difference_to_another_commit_is_an_error(copied: tuple[str, list[Commit]]) -> None:
    """The base was replaced by a commit that is as valid by itself."""
    base = copied[1][3]
    marker = Path(copied[0], layout.commit("tiny", 3, Step.SYNC))
    marker.write_bytes(base.model_copy(update={"committed_at": base.committed_at + 1}).to_bytes())
    message = f"weights of 000004/sync are a difference to 000003/sync with digest {base.digest}, which has digest"
    with pytest.raises(Damaged, match=message):
        read_weights(opened(copied), copied[1][4])
    assert any(message in fault.message for one in verify(opened(copied)) for fault in one.findings)
    marker.unlink()
    with pytest.raises(Damaged, match="which is missing"):
        read_weights(opened(copied), copied[1][4])


def test_a_trainer_that_restarted_stores_whole_weights_once(tiny_assets: Path, tmp_path: Path) -> None:
    config = config_of(tiny_assets, save_interval=None)
    first = run_to(str(tmp_path), config, 2)
    both = run_to(str(tmp_path), config, 4)
    assert both[:2] == first
    assert [bool(how and how.base) for how in map(stored, both)] == [False, True, False, True]
    assert all(read_weights(opened((str(tmp_path), both)), commit) for commit in both)


def test_weights_are_whole_again_once_the_differences_are_half_as_large(tiny_assets: Path, tmp_path: Path) -> None:
    """In float32 every update changes most elements: a difference is 0.4 times as large as the weights."""
    config = config_of(tiny_assets, "float32", save_interval=None)
    made = str(tmp_path), run_to(str(tmp_path), config, 4)
    assert [bool(how and how.base) for how in map(stored, made[1])] == [False, True, True, False]
    for commit in made[1]:
        assert weights_checksum(read_weights(opened(made), commit).items()) == commit.values["digest"]


def test_nothing_is_stored_where_that_is_turned_off(tiny_assets: Path, tmp_path: Path) -> None:
    (commit,) = run_to(str(tmp_path), config_of(tiny_assets, store_weights=False), 1)
    assert not commit.outputs
    assert commit.values.keys() == {"digest"}
