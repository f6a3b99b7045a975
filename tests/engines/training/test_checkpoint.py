import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn.engines.fleet.training import TrainingHandle, _Copy
from cairn.engines.training import parts
from cairn.engines.training.checkpoint import in_buckets
from cairn.engines.training.torch.engine import TorchEngine
from cairn.engines.types.errors import EngineError
from cairn.storage.store.canonical import seal, unseal
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store, StoredFile
from tests.engines.training.builders import make_batch, make_engine
from tests.older_checkpoints import save_torch, write_state

BATCH = make_batch(4)


def trained(folder: Path, steps: int = 2) -> TorchEngine:
    engine = make_engine(folder)
    for version in range(steps):
        engine.train(BATCH, num_steps=1, expected_version=version, input_digest="d")
    return engine


@pytest.mark.parametrize("older", [False, True])
def test_a_loaded_engine_goes_on_bitwise_where_the_saved_one_stood(folder: Path, store: Store, older: bool) -> None:
    engine = trained(folder)
    if older:
        save_torch(engine, store, "a/b")
    else:
        files = engine.save(store, "a/b")
        found = {file.path: (file.bytes, file.sha256) for file in files}
        assert found == {path: store.sha256(path) for path in store.find("a/b")}
    other = make_engine(folder)
    other.load(store, "a/b")
    position = other.position()
    assert (position.weight_version, position.state_digest) == (2, engine.state_digest())
    assert (position.last_input_digest, position.last_result) == (None, None)
    results = [e.train(BATCH, num_steps=1, expected_version=2, input_digest="d") for e in (engine, other)]
    assert results[0].state_digest == results[1].state_digest
    assert results[0].metrics == results[1].metrics


def test_a_copy_is_of_the_state_it_was_made_of_whatever_is_trained_since(folder: Path, store: Store) -> None:
    engine = trained(folder)
    digest = engine.state_digest()
    size = engine.copy_state()
    engine.train(BATCH, num_steps=1, expected_version=2, input_digest="d")
    files = engine.write_copy(store, "c")
    engine.describe_copy(store, "c", files[-1:])
    assert sum(file.bytes for file in files[:-1]) == size
    other = make_engine(folder)
    other.load(store, "c")
    assert other.position().state_digest == digest != engine.state_digest()
    engine.drop_copy()
    with pytest.raises(EngineError, match="holds no copy"):
        engine.write_copy(store, "c")


def step(engine: TorchEngine, store: Store) -> None:
    engine.train(BATCH, num_steps=1, expected_version=2, input_digest="d")


def load_earlier(engine: TorchEngine, store: Store) -> None:
    engine.load(store, "earlier")


def move(engine: TorchEngine, store: Store) -> None:
    state = [tensor for named in engine._state().values() for _, tensor in named]
    engine.offload()
    for tensor in state:
        tensor.detach().zero_()  # as a GPU's memory is another's then


@pytest.mark.parametrize("change", [step, load_earlier, move])
def test_a_change_of_the_state_waits_for_a_slow_copy_of_it(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch, change: Callable[[TorchEngine, Store], None]
) -> None:
    trained(folder, 1).save(store, "earlier")
    engine, passed = trained(folder), threading.Event()
    digest, copy = engine.state_digest(), parts._copy
    accumulate = engine._learners["actor"].accumulate_gradients

    def slowly(*args: Any) -> None:
        if change is step:
            assert passed.wait(60), "the passes of the model wait too"
        time.sleep(1)
        copy(*args)

    def noted(*args: Any) -> dict[str, float]:
        metrics = accumulate(*args)
        passed.set()
        return metrics

    monkeypatch.setattr(parts, "_copy", slowly)
    monkeypatch.setattr(engine._learners["actor"], "accumulate_gradients", noted)
    engine.copy_state()
    change(engine, store)
    files = engine.write_copy(store, "c")
    engine.describe_copy(store, "c", files[-1:])
    other = make_engine(folder)
    other.load(store, "c")
    assert other.state_digest() == digest


def test_a_copy_that_failed_is_an_error_of_the_engine_and_the_next_one_is_whole(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = trained(folder)
    with monkeypatch.context() as patch:
        patch.setattr(parts, "_copy", fail)
        engine.copy_state()
        step(engine, store)
        with pytest.raises(EngineError, match=r"not copied to the host \(CUDA error: .*\): it has to be copied again"):
            engine.write_copy(store, "c")
    digest = engine.state_digest()
    engine.save(store, "d")
    other = make_engine(folder)
    other.load(store, "d")
    assert other.state_digest() == digest


class Counting:
    """A store that notes the ranges that are read of it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ranges: list[tuple[str, int, int]] = []

    def read_range(self, path: str, start: int, end: int) -> bytes:
        self.ranges.append((path, start, end))
        return self._store.read_range(path, start, end)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_files_are_read_by_ranges_and_every_byte_once(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "FILE_BYTES", 100_000)
    monkeypatch.setattr(parts, "CHUNK_BYTES", 4_000)
    monkeypatch.setattr(parts, "RANGE_BYTES", 20_000)
    engine = trained(folder)
    engine.save(store, "c")
    sizes = {path: size for path, size in store.find("c").items() if path.endswith(".part")}
    assert len(sizes) > 6
    assert max(sizes.values()) <= 100_000
    counting: Any = Counting(store)
    other = make_engine(folder)
    other.load(counting, "c")
    assert other.state_digest() == engine.state_digest()
    read: dict[str, int] = {}
    for path, start, end in sorted(counting.ranges):
        assert start == read.get(path, 0)
        assert end - start <= 20_000
        read[path] = end
    assert read == sizes


def truncate(store: Store, path: str) -> None:
    store.write(path, store.read(path)[:-1])


def flip(store: Store, path: str) -> None:
    data = bytearray(store.read(path))
    data[-5] ^= 1
    store.write(path, bytes(data))


def remove(store: Store, path: str) -> None:
    store.delete(path)


@pytest.mark.parametrize("name", ["00000-00000.part", "00000.index.json", "training_state.json"])
@pytest.mark.parametrize("damage", [truncate, flip, remove])
def test_a_damaged_file_is_named_and_the_engine_serves_nothing_half_loaded(
    folder: Path, store: Store, damage: Callable[[Store, str], None], name: str
) -> None:
    trained(folder).save(store, "c")
    damage(store, f"c/{name}")
    engine = make_engine(folder)
    with pytest.raises(Damaged, match=name):
        engine.load(store, "c")
    if name == "00000-00000.part":
        with pytest.raises(EngineError, match="load a checkpoint"):
            engine.position()
    trained(folder).save(store, "c")
    engine.load(store, "c")
    assert engine.position().weight_version == 2


def write_changed(engine: TorchEngine, store: Store, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Write a checkpoint of other tensors than the engine's, by their whole names."""
    tensors = {f"{kind}.{name}": t.detach().clone() for kind, named in engine._state().items() for name, t in named}
    change(tensors)
    regions = [
        (parts.Region.rows(name, tuple(tensor.shape), 0, len(tensor)), tensor.view(-1))
        for name, tensor in tensors.items()
    ]
    copy = parts.copy_to_host(regions, rank=0, weight_version=2, state_digest=engine.state_digest())
    *_, index = parts.write_copy(store, "c", copy)
    path = "c/training_state.json"
    parts.write_description(store, path, [index], weight_version=2, state_digest=engine.state_digest())


def test_a_state_other_than_the_digest_says_is_refused(folder: Path, store: Store) -> None:
    engine = trained(folder)
    write_changed(engine, store, lambda tensors: tensors["exp_avg.model.norm.weight"][3].add_(1e-7))
    with pytest.raises(Damaged, match=f"{engine.state_digest()} was saved"):
        make_engine(folder).load(store, "c")


def test_tensors_that_do_not_fit_the_model_are_named(folder: Path, store: Store) -> None:
    engine, norm = trained(folder), "model.norm.weight"

    def load(change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        write_changed(engine, store, change)
        make_engine(folder).load(store, "c")

    with pytest.raises(Damaged, match=rf"lacks exp_avg_sq of {norm}"):
        load(lambda tensors: tensors.pop(f"exp_avg_sq.{norm}"))
    with pytest.raises(Damaged, match=r"holds exp_avg of extra, which the model does not have"):
        load(lambda tensors: tensors.update({"exp_avg.extra": torch.zeros(1)}))
    with pytest.raises(Damaged, match=rf"holds parameters.{norm} as \(3,\), where the model has \(64,\)"):
        load(lambda tensors: tensors.update({f"parameters.{norm}": torch.zeros(3)}))


def claim_one_huge_chunk(index: dict[str, Any]) -> None:
    index["chunk_bytes"] = 2**62
    for file in index["files"]:
        file |= {"bytes": 2**62, "chunks": file["chunks"][:1]}


def split_into_two_shapes(index: dict[str, Any]) -> None:
    (name, columns, shape), part = index["tensors"][0], index["parts"][0]
    assert part["tensor"] == 0
    middle, offset = 8 * (shape[0] * columns // 16), part["offset"]
    size = {"float32": 4, "bfloat16": 2}[part["dtype"]]
    first = {**part, "tensor": len(index["tensors"]), "place": [*part["place"][:5], middle, *part["place"][6:]]}
    second = {**part, "offset": offset + middle * size, "place": [*part["place"][:4], middle, *part["place"][5:]]}
    index["tensors"].append([name, columns, [2**70, *shape[1:]]])
    index["parts"][:1] = [first, second]


@pytest.mark.parametrize("forge", [claim_one_huge_chunk, split_into_two_shapes])
def test_a_forged_index_is_damage_to_every_rank(
    folder: Path, store: Store, forge: Callable[[dict[str, Any]], None]
) -> None:
    """Any other error would be raised by one rank alone, while the others wait for what it should have read."""
    engine = trained(folder)
    engine.save(store, "c")
    index = unseal(store.read("c/00000.index.json"))
    forge(index)
    data = seal(index)
    store.write("c/00000.index.json", data)
    file = StoredFile("c/00000.index.json", len(data), hashlib.sha256(data).hexdigest())
    digest = engine.state_digest()
    parts.write_description(store, "c/training_state.json", [file], weight_version=2, state_digest=digest)
    with pytest.raises(Damaged):
        make_engine(folder).load(store, "c")


def test_older_files_that_do_not_fit_the_model_are_named(folder: Path, store: Store) -> None:
    engine = trained(folder)
    whole = {kind: {name: tensor.detach() for name, tensor in named} for kind, named in engine._state().items()}
    norm = "model.norm.weight"

    def load(**changed: dict[str, torch.Tensor]) -> None:
        write_state(store, "c", (whole | changed).items(), weight_version=2, state_digest=engine.state_digest())
        make_engine(folder).load(store, "c")

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


def test_a_step_that_is_tried_again_copies_again_what_a_rank_failed_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        def result(self, *_: Any) -> None:
            raise EngineError("the state was not copied to the host")

    training = object.__new__(TrainingHandle)
    monkeypatch.setattr(TrainingHandle, "call_all", lambda *_: [Failed()])
    vars(training).update(name="training", restarts=0, _timeout=1.0, _copy=_Copy(3, "digest", 0, 1))
    assert training.holds_copy(3, "digest")
    with pytest.raises(EngineError, match="not copied"):
        training.write_copy("store", "c")
    assert not training.holds_copy(3, "digest")
