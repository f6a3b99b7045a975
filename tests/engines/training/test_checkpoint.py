from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_safetensors

from cairn.engines.training.checkpoint import in_buckets, read_description, write_state
from cairn.engines.training.torch.engine import TorchEngine
from cairn.engines.types.errors import EngineError
from cairn.storage.opening import open_store
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store
from tests.engines.training.builders import make_batch, make_engine, model_folder

BATCH = make_batch(4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def trained(folder: Path, steps: int = 2) -> TorchEngine:
    engine = make_engine(folder)
    for version in range(steps):
        engine.train(BATCH, num_steps=1, expected_version=version, input_digest="d")
    return engine


def test_a_loaded_engine_goes_on_bitwise_where_the_saved_one_stood(folder: Path, store: Store) -> None:
    engine = trained(folder)
    files = engine.save(store, "a/b")
    assert {file.path: (file.bytes, file.sha256) for file in files} == {p: store.sha256(p) for p in store.find("a/b")}
    other = make_engine(folder)
    other.load(store, "a/b")
    position = other.position()
    assert (position.weight_version, position.state_digest) == (2, engine.state_digest())
    assert (position.last_input_digest, position.last_result) == (None, None)
    results = [e.train(BATCH, num_steps=1, expected_version=2, input_digest="d") for e in (engine, other)]
    assert results[0].state_digest == results[1].state_digest
    assert results[0].metrics == results[1].metrics


def test_files_are_safetensors_under_hugging_face_names_and_small_enough(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.engines.training.checkpoint.FILE_BYTES", 100_000)
    engine = trained(folder)
    engine.save(store, "c")
    tensors = {"parameters": {}, "exp_avg": {}, "exp_avg_sq": {}}  # type: dict[str, dict[str, torch.Tensor]]
    description = read_description(store, "c")
    assert len(description.files) > 6
    for file in description.files:
        content = load_safetensors(store.read(f"c/{file.name}"))
        assert sum(t.nbytes for t in content.values()) <= 100_000
        tensors[file.kind] |= content
    for kind in tensors.values():
        assert set(kind) == {name for name, _ in engine._model.named_parameters()}
    monkeypatch.undo()
    make_engine(folder).load(store, "c")


def truncate(store: Store, path: str) -> None:
    store.write(path, store.read(path)[:-1])


def flip(store: Store, path: str) -> None:
    data = bytearray(store.read(path))
    data[-5] ^= 1
    store.write(path, bytes(data))


def remove(store: Store, path: str) -> None:
    store.delete(path)


@pytest.mark.parametrize(
    "name", ["parameters-00000.safetensors", "exp_avg_sq-00000.safetensors", "training_state.json"]
)
@pytest.mark.parametrize("damage", [truncate, flip, remove])
def test_a_damaged_file_is_named_and_the_engine_serves_nothing_half_loaded(
    folder: Path, store: Store, damage: Callable[[Store, str], None], name: str
) -> None:
    trained(folder).save(store, "c")
    damage(store, f"c/{name}")
    engine = make_engine(folder)
    with pytest.raises(Damaged, match=name):
        engine.load(store, "c")
    if name != "training_state.json":
        with pytest.raises(EngineError, match="load a checkpoint"):
            engine.position()
    trained(folder).save(store, "c")
    engine.load(store, "c")
    assert engine.position().weight_version == 2


def test_a_state_other_than_the_digest_says_is_refused(folder: Path, store: Store) -> None:
    engine = trained(folder)
    files = [(kind, {n: t.clone() for n, t in tensors}) for kind, tensors in engine._state().items()]
    files[1][1]["model.norm.weight"][3] += 1e-7
    write_state(store, "c", files, weight_version=2, state_digest=engine.state_digest())
    with pytest.raises(Damaged, match=f"{engine.state_digest()} was saved"):
        make_engine(folder).load(store, "c")


def test_tensors_that_do_not_fit_the_model_are_named(folder: Path, store: Store) -> None:
    engine = trained(folder)
    whole = {kind: dict(tensors) for kind, tensors in engine._state().items()}
    norm = "model.norm.weight"

    def load(**changed: dict[str, torch.Tensor]) -> None:
        write_state(store, "c", (whole | changed).items(), weight_version=2, state_digest=engine.state_digest())
        make_engine(folder).load(store, "c")

    with pytest.raises(Damaged, match=rf"lacks exp_avg of {norm}"):
        load(exp_avg={name: tensor for name, tensor in whole["exp_avg"].items() if name != norm})
    with pytest.raises(Damaged, match=r"holds parameters of extra, which the model does not have"):
        load(parameters=whole["parameters"] | {"extra": torch.zeros(1)})
    with pytest.raises(Damaged, match=rf"holds {norm} as torch.float32 \(3,\), where the model has .* \(64,\)"):
        load(parameters=whole["parameters"] | {norm: torch.zeros(3)})


def test_a_new_save_replaces_an_old_one(folder: Path, store: Store) -> None:
    trained(folder).save(store, "c")
    newer = trained(folder, steps=3)
    newer.save(store, "c")
    engine = make_engine(folder)
    engine.load(store, "c")
    assert engine.position().weight_version == 3


def test_buckets_keep_the_order_and_the_limit() -> None:
    tensors = [(name, torch.zeros(size)) for name, size in (("a", 10), ("b", 10), ("c", 50), ("d", 5), ("e", 20))]
    buckets = [list(bucket) for bucket in in_buckets(tensors, 100)]
    assert buckets == [["a", "b"], ["c"], ["d", "e"]]
