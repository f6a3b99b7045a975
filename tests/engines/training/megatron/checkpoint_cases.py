"""What two ranks do with checkpoints and with updates that are refused, most of them with a critic."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.types.errors import EngineError
from cairn.engines.types.types import TrainBatch
from cairn.storage.opening import open_store
from cairn.storage.store.store import Store
from tests.engines.training.megatron.cases import (
    ALGORITHM,
    BATCH,
    CP,
    EP,
    EXPERTS_ALONE,
    FROZEN,
    PP,
    PPO,
    SP,
    TRAINING,
    VPP,
    ZERO,
    Lists,
)
from tests.engines.training.sharded_cases import FullStore, raised
from tests.older_checkpoints import save_megatron

DISTILLED = ALGORITHM.model_copy(update={"use_opd": True})
LAYOUTS: dict[str, dict[str, Any]] = {"tensor": {**SP, **ZERO}, "pipeline": {**PP, **ZERO}, "data": ZERO}
SUCCESSIONS: dict[str, list[dict[str, Any]]] = {
    "whole": [EP, VPP, EP],
    "distributed": [{**EP, **ZERO}, {**CP, **ZERO}, {**EP, **ZERO}],
}
NORM_ALONE: Lists = (("only_train_params_name_list", (r"model\.norm",)),)
"""One parameter of the last of two pipeline stages."""
FREEZING: dict[str, tuple[str, dict[str, Any], Lists]] = {
    "a stage, whole": ("deep", PP, FROZEN),
    "a stage": ("deep", {**PP, **ZERO}, FROZEN),
    "layers": ("deep", ZERO, FROZEN),
    "parts of layers": ("deep", {**SP, **ZERO}, FROZEN),
    "all but a norm, bfloat16": ("deep", PP, (*NORM_ALONE, ("dtype", "bfloat16"))),
    "all but experts": ("experts", {**EP, **ZERO}, EXPERTS_ALONE),
}
"""What is frozen → model, layout and options."""
WITHOUT_RESPONSES = TrainBatch([np.arange(n, dtype=np.int32) for n in (3, 1)], [0, 0], [np.zeros(0, np.uint8)] * 2)


def engine_of(
    folder: Path,
    megatron: dict[str, Any],
    rank: int,
    algorithm: AlgorithmConfig = PPO,
    teacher: Path | None = None,
    lists: Lists = (),
) -> Any:
    from cairn.engines.training.factory import make_engine

    return make_engine(
        ModelConfig(path=str(folder), teacher_path=str(teacher) if teacher else None),
        TrainingConfig(engine="megatron", world_size=2, megatron=megatron, **TRAINING, **dict(lists)),
        algorithm,
        temperature=1.0,
        total_steps=100,
        rank=rank,
        world_size=2,
    )


def set_file_bytes(size: int) -> None:
    from cairn.engines.training import parts

    parts.FILE_BYTES, parts.CHUNK_BYTES, parts.RANGE_BYTES = size, size // 8, size // 2


def train(engine: Any, first: int, count: int) -> list[dict[str, float]]:
    return [
        engine.train(BATCH, num_steps=1, expected_version=version, input_digest="d").metrics
        for version in range(first, first + count)
    ]


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(EngineError) as error:
        call()
    return str(error.value)


def offloaded(engine: Any, store: Store) -> dict[str, Any]:
    """What an engine still gives out while its memory is away, and what it refuses; it has it back in the end."""

    def exported(buckets: Any) -> dict[str, torch.Tensor]:
        return {name: tensor for bucket in buckets for name, tensor in bucket.items()}

    before, digest = exported(engine.export_weights(50_000)), engine.state_digest()
    reference = engine.score(BATCH, "ref")
    for _ in range(2):
        engine.offload()
    exported_weights, everywhere = exported(engine.export_weights(50_000)), exported(engine.export_on_device(50_000))
    own = exported(engine.export_weights(50_000, in_turn=True))
    report = {
        "digest": engine.position().state_digest == digest,
        "given": exported_weights.keys() == before.keys()
        and all(exported_weights[name].equal(before[name]) for name in before),
        "everywhere": [name for name in everywhere if name in before and not everywhere[name].equal(before[name])],
        "names": sorted(everywhere),
        "own": sorted(own),
        "own_equal": all(own[name].equal(everywhere[name]) for name in own),
        "refused": [
            raised(work)
            for work in (
                lambda: train(engine, 2, 1),
                lambda: engine.score(BATCH, "actor"),
                lambda: engine.save(store, "again"),
                lambda: engine.load(store, "tensor-2"),
                lambda: engine.weights_checksum(),
            )
        ],
    }
    for _ in range(2):
        engine.onload()
    after = engine.score(BATCH, "ref")
    report["reference"] = all((one == other).all() for one, other in zip(reference, after, strict=True))
    return report


def succession(folder: Path, store: Store, rank: int, optimizer: str) -> dict[str, Any]:
    """One update by each layout, which goes on from the one before, and the same updates by the first alone."""
    report: dict[str, Any] = {"metrics": [], "straight": [], "saved": [], "read": []}
    for version, megatron in enumerate(SUCCESSIONS[optimizer]):
        engine = engine_of(folder, megatron, rank, AlgorithmConfig())
        if version:
            engine.load(store, f"{optimizer}-{version}")
            report["read"].append(engine.position().state_digest)
        report["metrics"] += train(engine, version, 1)
        engine.save(store, f"{optimizer}-{version + 1}")
        report["saved"].append(engine.state_digest())
        report["weights"] = engine.weights_checksum()
        if version == 0:
            report["straight"] = report["metrics"] + train(engine, 1, len(SUCCESSIONS[optimizer]) - 1)
    return report


def frozen(work: Path, store: Store, rank: int) -> dict[str, Any]:
    """An update, and another one, which is then made again from a checkpoint between the two; and that checkpoint read
    by the layout after it, where that freezes the same with the same optimizer."""
    report: dict[str, Any] = {}
    for name, (model, megatron, lists) in FREEZING.items():
        engine = engine_of(work / model, megatron, rank, ALGORITHM, lists=lists)
        train(engine, 0, 1)
        engine.save(store, name)
        saved = engine.state_digest()
        metrics = train(engine, 1, 1)
        ended = engine.state_digest()
        engine.load(store, name)
        engine.offload()
        engine.onload()
        report[name] = {
            "read": engine.state_digest() == saved != ended,
            "metrics": train(engine, 1, 1) == metrics,
            "digest": engine.state_digest() == ended,
            "weights": {
                key: value.tolist() for bucket in engine.export_weights(1 << 30) for key, value in bucket.items()
            },
        }
        if name in ("layers", "parts of layers"):
            before = list(FREEZING)[list(FREEZING).index(name) - 1]
            engine.load(store, before)
            report[name]["of another layout"] = engine.state_digest() == report[before]["saved"]
        report[name]["saved"] = saved
    report["of other lists"] = refusal(lambda: engine_of(work / "deep", ZERO, rank, ALGORITHM).load(store, "layers"))
    return report


def cases(folder: Path, work: Path, rank: int) -> dict[str, Any]:
    store = open_store(str(work / "store"))
    report: dict[str, Any] = {}
    report["frozen"] = frozen(work, store, rank)
    for optimizer in SUCCESSIONS:
        report[optimizer] = succession(work / "experts", store, rank, optimizer)
    for layout in LAYOUTS:
        engine = engine_of(folder, LAYOUTS[layout], rank)
        set_file_bytes(320_000)
        engine.save(store, f"{layout}-0")
        train(engine, 0, 2)
        files = engine.save(store, f"{layout}-2")
        saved = engine.state_digest()
        save_megatron(engine, store, f"{layout}-older")
        report[layout] = {
            "saved": saved,
            "weights": engine.weights_checksum(),
            "whole": {file.path: (file.bytes, file.sha256) for file in files}
            == {path: store.sha256(path) for path in store.find(f"{layout}-2")},
            "files": sum(file.path.endswith(".part") for file in files),
            "metrics": train(engine, 2, 2),
            "digest": engine.state_digest(),
        }
    for source in LAYOUTS:  # the last engine reads them all
        engine.load(store, f"{source}-2")
        report[source]["read by data"] = engine.position().state_digest
        engine.load(store, f"{source}-older")
        report[source]["older read by data"] = engine.position().state_digest
        report[source]["metrics by data"] = train(engine, 2, 2)
    for target in ("tensor", "pipeline"):
        engine = engine_of(folder, LAYOUTS[target], rank)
        engine.load(store, "tensor-2")
        report[target]["read"] = engine.state_digest()
        report[target]["offloaded"] = offloaded(engine, store)
        report[target]["resumed"] = train(engine, 2, 2)
        report[target]["resumed digest"] = engine.state_digest()
        engine.load(store, f"{target}-0")
        report[target]["first"] = engine.position().weight_version
    engine = engine_of(folder, PP, rank)
    full: Any = FullStore(store, rank=1)
    report["failed save"] = raised(lambda: engine.save(full, "full"))
    report["described"] = store.exists("full/megatron_state.json")
    engine.save(store, "last")
    report["scored"] = [len(scores) for scores in engine.score(WITHOUT_RESPONSES, "actor")]
    report["wrong version"] = raised(lambda: train(engine, 7, 1))
    assert BATCH.advantages is not None
    broken = dataclasses.replace(BATCH, advantages=[np.full_like(BATCH.advantages[0], np.nan), *BATCH.advantages[1:]])
    before = engine.state_digest()
    report["not finite"] = raised(lambda: engine.train(broken, num_steps=1, expected_version=0, input_digest="d"))
    report["unchanged"] = engine.position().state_digest == before
    engine.export_hf(work / "exported")
    if rank == 0:
        file = next(path for path in store.find("last") if path.endswith(".part"))
        data = bytearray(store.read(file))
        data[len(data) // 2] ^= 1
        store.write(file, bytes(data))
    dist.barrier()
    report["without a critic"] = refusal(lambda: engine.load(store, "whole-1"))
    report["missing"] = raised(lambda: engine.load(store, "nowhere"))
    report["after a refusal"] = raised(engine.position)
    report["damaged"] = raised(lambda: engine.load(store, "last"))
    report["after damage"] = raised(engine.position)
    plain = engine_of(folder, SP, rank, DISTILLED, work / "teacher")
    report["teacher"] = [values.tolist() for values in plain.score(BATCH, "teacher")]
    train(plain, 0, 1)
    plain.save(store, "plain")
    saved = plain.state_digest()
    train(plain, 1, 1)
    report["plain"] = plain.state_digest()
    report["with a critic"] = refusal(lambda: plain.load(store, "last"))
    report["untouched"] = plain.position().state_digest
    plain.load(store, "plain")
    assert plain.state_digest() == saved
    report["saved again"] = [
        {Path(file.path).name: file.sha256 for file in plain.save(store, folder)} for folder in ("again", "once more")
    ]
    train(plain, 1, 1)
    report["plain resumed"] = plain.state_digest()
    whole = engine_of(folder, PP, rank)
    whole.load(store, "tensor-2")
    report["read without a distributed optimizer"] = whole.state_digest()
    return report


def convert(folder: Path, work: Path) -> None:
    """Model folders of checkpoints that two ranks wrote, made by one."""
    from cairn.engines.training.megatron.convert import export_checkpoint

    store = open_store(str(work / "store"))
    for checkpoint, model in (
        ("tensor-2", folder),
        ("tensor-older", folder),
        ("whole-3", work / "experts"),
        ("distributed-3", work / "experts"),
    ):
        export_checkpoint(store, checkpoint, model, work / checkpoint, dtype="float32", device=torch.device("cpu"))


def launched(rank: int, folder: Path, work: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=2)
    (work / f"report-{rank}.json").write_text(json.dumps(cases(folder, work, rank)))
    dist.destroy_process_group()
    if rank == 0:
        convert(folder, work)
