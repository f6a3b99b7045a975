"""Each way by which weights travel to a real SGLang server, and what is left where it breaks off."""

import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from cairn.configs.schema.operations import FleetConfig
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.fleet.handles import UPDATING
from cairn.engines.fleet.requirements import weight_problems
from cairn.engines.fleet.training import TrainingHandle
from cairn.engines.fleet.turns import Turns
from cairn.engines.fleet.weights import transports
from cairn.engines.fleet.weights.transports import InStore, transport_of
from cairn.engines.rollout.base import RolloutEngine
from cairn.engines.rollout.sglang.engine import SGLangEngine
from cairn.engines.training.base import TrainingEngine
from cairn.engines.training.weight_source import WeightSource
from cairn.engines.types.errors import EngineDied, EngineError, WeightsDiffer
from cairn.engines.types.types import SamplingParams
from cairn.engines.weights.buckets import Bucket
from cairn.engines.weights.layout import StoredVersion
from cairn.flows.pipeline import Pipeline
from cairn.storage.ledger.commits import Step
from cairn.storage.store.errors import Damaged
from cairn.tasks.halves import publish_for_open_halves
from tests.engines.training.builders import make_batch
from tests.fleets import send, sync, verify, versions
from tests.ray_fixtures import fleet_config
from tests.requests import group
from tests.sglang_server import sglang_config
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

DEADLINE = 10.0
"""Seconds that a broadcast may take where a server dies or hangs."""
TRANSPORTS = ("tensor", "disk", "distributed")
ASKED = group(0, [5, 6, 7], (1, 2), SamplingParams(8))

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def fleet(sglang_model: Path, ray_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    rollout = sglang_config().model_dump(exclude={"rollout_batch_size", "rollout_max_response_len", "num_rollout"})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("transports"))
        config = fleet_config(sglang_model, rollout=rollout)
        with Fleet.start(config, name="transports", total_steps=100) as fleet:
            yield fleet


def by(transport: str, folder: Path, **options: Any) -> FleetConfig:
    disk = {"update_weight_disk_dir": str(folder)} if transport == "disk" else {}
    return fleet_config(
        "model", fleet={"update_weight_transport": transport, "call_timeout": 120, **disk, **options}
    ).fleet


def train_once(fleet: Fleet) -> int:
    version = fleet.training.position().weight_version
    fleet.training.train(make_batch(), num_steps=1, expected_version=version, input_digest=str(version))
    return version + 1


def serves_nothing(fleet: Fleet) -> bool:
    with pytest.raises(EngineError, match="weight update"):
        list(fleet.rollout[0].generate(ASKED))
    return versions(fleet) == [None]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_log_probs_are_the_trainers_after_an_update_and_not_before(
    fleet: Fleet, transport: str, tmp_path: Path
) -> None:
    sync(fleet)
    for _ in range(2):  # the second broadcast finds the group of the first
        version = train_once(fleet)
        with pytest.raises(EngineError, match="log-probs of the same tokens differ"):
            verify(fleet)
        send(fleet, version, by(transport, tmp_path, update_weight_buffer_size=100_000))
        assert versions(fleet) == [version]
        verify(fleet)
    (done, *_) = [completion for part in fleet.rollout[0].generate(ASKED) for completion in part]
    assert set(done.weight_versions.tolist()) == {version}
    folders = {file.parent.name for file in tmp_path.glob("**/*.safetensors")}
    assert folders == ({f"weight_v{version:06d}"} if transport == "disk" else set()), "those of earlier ones are gone"


def test_a_server_gets_what_changed_since_the_version_that_it_has(fleet: Fleet, tmp_path: Path) -> None:
    (engine,), training = fleet.rollout, fleet.training
    transport = transport_of(by("store", tmp_path), training, load_timeout=60, maps_gpu_memory=False)
    versions: list[StoredVersion] = []

    def update(version: int) -> None:
        engine.call(UPDATING, RolloutEngine.begin_weight_update, version).result()
        transport.send(version, InStore(str(tmp_path), tuple(versions)), [engine])
        engine.call(UPDATING, RolloutEngine.end_weight_update).result()
        assert engine.call(UPDATING, RolloutEngine.weights_checksum).result() == versions[-1].digest

    for _ in range(3):
        version, base = train_once(fleet), versions[-1].digest if versions else None
        digest = training.checksum_at(version, "float32")
        training.copy_version(version, "float32", digest, base)
        files = training.write_version(str(tmp_path), f"v{version}")
        versions.append(StoredVersion(str(version), digest, tuple(files)))
        update(version)
        verify(fleet)
        if base is None:
            (whole,) = files
            Path(tmp_path, whole.path).rename(tmp_path / "away")  # not read again by who has it
    digest = training.checksum_at(version, "float32")
    training.copy_version(version, "float32", digest, digest)
    files = training.write_version(str(tmp_path), "same")
    versions.append(StoredVersion("without a change", digest, tuple(files)))
    update(version)  # its ranks receive nothing, and have the checksum of all
    send(fleet, version, by("tensor", tmp_path))
    update(version)  # all weights, from the copy
    engine.call(UPDATING, RolloutEngine.begin_weight_update, version).result()  # breaks off
    with pytest.raises(Damaged, match="is missing"):
        update(version)
    (tmp_path / "away").rename(tmp_path / whole.path)
    update(version)
    verify(fleet)


def test_an_older_version_is_broadcast_from_its_copy_while_the_trainer_is_at_work(fleet: Fleet, tmp_path: Path) -> None:
    (engine,), training = fleet.rollout, fleet.training
    sync(fleet)
    version = train_once(fleet)
    options = by("distributed", tmp_path, update_weight_buffer_size=100_000)
    transport = transport_of(options, training, load_timeout=60, maps_gpu_memory=False, lag=1)
    stored = transport.store(version)
    training.save(str(tmp_path), "older")
    train_once(fleet)
    work = [training.call(None, TrainingEngine.score, make_batch(), "actor") for _ in range(500)][-1]
    with engine.alone():
        engine.call(UPDATING, RolloutEngine.begin_weight_update, version).result()
        transport.send(version, stored, [engine])
        engine.call(UPDATING, RolloutEngine.end_weight_update).result()
    assert versions(fleet) == [version]
    assert not ray.wait([work.ref], timeout=0)[0], "the trainer ended its work for it"
    work.result()
    with pytest.raises(EngineError, match="log-probs of the same tokens differ"):
        verify(fleet)
    training.load(str(tmp_path), "older")
    verify(fleet)


@pytest.mark.slow
def test_a_lagged_run_has_the_weights_of_its_lag_broadcast_while_its_trainer_goes_on(
    ray_cluster: Cluster, tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"num_rollout": 4, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 6}
    lagged = {**sglang_config().model_dump(), **sizes, "pipeline": "lagged", "lag": 1}
    config = tiny_config(tiny_assets, rollout=lagged, fleet={"update_weight_transport": "distributed"})
    assert not list(weight_problems(config))
    with (
        Fleet.start(config, name="lagged", total_steps=4) as fleet,
        tiny_context(str(tmp_path / "lagged"), config, fleet=fleet) as (run, _),  # type: ignore[arg-type]
    ):
        publish_for_open_halves(run)
        pipeline = Pipeline(run, DirectSteps(run), 0, learned=lambda index: None, stop=run.stopping.set)
        with closing(pipeline.run(pipeline.iterate, 4)) as iterations:
            assert len(list(iterations)) == 4
        assert [run.committed(i, Step.ROLLOUT, "00-000").weight_version_in for i in range(4)] == [0, 0, 1, 2]
        assert (fleet.training.restarts, versions(fleet)) == (0, [2])


def test_a_server_maps_what_the_trainer_shares_with_it(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a colocated fleet, but for the memory, which is the machine's here and a GPU's there."""
    (engine,) = fleet.rollout
    monkeypatch.setattr(engine, "ranks", range(1))
    version = train_once(fleet)
    send(fleet, version, by("tensor", tmp_path, update_weight_buffer_size=100_000))
    assert versions(fleet) == [version]
    verify(fleet)


def with_an_altered_byte(stored: Any) -> Any:
    """What a transport stored, a model folder or buckets, with one byte of a weight altered."""
    if isinstance(stored, Path):
        (file,) = stored.glob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
        return stored
    buckets, checksum = stored
    first = {name: tensor.clone() for name, tensor in ray.get(buckets[0]).items()}
    next(iter(first.values())).view(-1).view(torch.uint8)[5] ^= 1
    return [ray.put(Bucket(first)), *buckets[1:]], checksum


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_altered_byte_is_found_where_it_arrives_and_the_version_can_be_sent_again(
    fleet: Fleet, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync(fleet)
    options = by(transport, tmp_path, update_weight_buffer_size=100_000)
    sender = transport_of(options, fleet.training, load_timeout=60, maps_gpu_memory=False, lag=1)
    monkeypatch.setattr(fleet.weights, "_transport", sender)
    version, (engine,) = train_once(fleet), fleet.rollout
    publication = fleet.weights.publish(version, keep=2)
    stored = fleet.weights._stored[version][1]
    fleet.weights._stored[version] = publication, with_an_altered_byte(stored)
    with pytest.raises(WeightsDiffer, match=f"rollout:0 received .* version {version} was published with"):
        fleet.weights.serve(engine, version)
    assert serves_nothing(fleet)
    assert fleet.weights.publish(version, keep=2) == publication
    fleet.weights.serve(engine, version)
    assert versions(fleet) == [version]
    verify(fleet)


def test_model_folders_are_kept_where_asked(fleet: Fleet, tmp_path: Path) -> None:
    version = train_once(fleet)
    send(fleet, version, by("disk", tmp_path, update_weight_disk_keep_files=True))
    assert [file.parent.name for file in tmp_path.glob("**/*.safetensors")] == [f"weight_v{version:06d}"]


def after_the_first_bucket(give: Callable[..., Iterator[Any]], strike: Callable[[Any], Any]) -> Callable[..., Any]:
    """Buckets as they are given, but for a strike before the second."""

    def struck(*args: Any) -> Iterator[Any]:
        for index, bucket in enumerate(give(*args)):
            yield strike(bucket) or bucket if index == 1 else bucket

    return struck


@pytest.mark.parametrize(("transport", "giver"), [("tensor", "export_weights"), ("distributed", "broadcast_weights")])
def test_a_trainer_that_dies_between_buckets_leaves_no_engine_that_serves_a_mixture(
    fleet: Fleet, transport: str, giver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, version = versions(fleet), train_once(fleet)

    def kill(_: object) -> None:
        os.kill(fleet.training.health()["pid"], signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(fleet.training, giver, after_the_first_bucket(getattr(fleet.training, giver), kill))
        began = time.monotonic()
        with pytest.raises(EngineDied):
            send(fleet, version, by(transport, tmp_path, update_weight_buffer_size=100_000))
        assert time.monotonic() - began < 60
    # Buckets are stored before an engine is given any; what is broadcast comes from the trainer itself.
    assert versions(fleet) == before if transport == "tensor" else serves_nothing(fleet)
    fleet.training.ensure_alive()
    assert sync(fleet) == [0]


def test_a_refused_bucket_releases_the_trainer_that_broadcasts_it(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = train_once(fleet)
    pid = fleet.training.health()["pid"]

    def rename(bucket: Any) -> Any:
        layout, sending = bucket
        return [("model.nothing", *layout[0][1:]), *layout[1:]], sending

    with monkeypatch.context() as patch:
        patch.setattr(
            fleet.training, "broadcast_weights", after_the_first_bucket(fleet.training.broadcast_weights, rename)
        )
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"no weight model\.nothing"):
            send(fleet, version, by("distributed", tmp_path, update_weight_buffer_size=100_000))
        assert time.monotonic() - began < 60
    assert serves_nothing(fleet)
    send(fleet, version, by("distributed", tmp_path))
    verify(fleet)
    assert fleet.training.health()["pid"] == pid


@pytest.fixture
def _no_turns(fleet: Fleet) -> Iterator[None]:
    """Afterwards the engines share no memory."""
    yield
    for handle in (*fleet.rollout, fleet.training):
        handle.make_room = lambda: None


@pytest.mark.usefixtures("_no_turns")
def test_a_server_gives_and_takes_its_memory_in_slimes_order(fleet: Fleet, tmp_path: Path) -> None:
    """Without a GPU a server answers the calls and keeps its memory: what is seen here is their order."""
    (engine,) = fleet.rollout
    log = Path(engine.health()["log"])
    seen = len(log.read_text())
    options = by("tensor", tmp_path, colocate=True)
    turns = Turns(fleet.rollout, fleet.training, options)
    turns.for_training()
    assert engine.health()["released"] == ["kv_cache", "weights"]
    with pytest.raises(EngineError, match="memory was released"):
        list(engine.generate(ASKED))
    assert versions(fleet) == [None]
    version = train_once(fleet)
    turns.for_update([engine])
    assert fleet.training.health()["offloaded"]
    send(fleet, version, options)
    with pytest.raises(EngineError, match="memory was released"):
        list(engine.generate(ASKED))
    turns.for_rollout([engine])
    turns.for_rollout([engine])
    assert versions(fleet) == [version]
    assert len(list(engine.generate(ASKED))) == 2
    fleet.training.onload()
    verify(fleet)
    calls = re.findall(r"POST /(\w+_memory_occupation|begin_weight_update|generate)", log.read_text()[seen:])
    assert [call for call, _ in itertools.groupby(calls)] == [
        "release_memory_occupation",
        "resume_memory_occupation",
        "begin_weight_update",
        "resume_memory_occupation",
        "generate",
    ]


@pytest.mark.slow
def test_a_server_that_runs_elsewhere_takes_broadcasts_and_folders(
    engine: SGLangEngine, sglang_model: Path, ray_cluster: Cluster, tmp_path: Path
) -> None:
    rollout = sglang_config().model_dump(include={"engine", "timeout"}) | {"external_urls": [engine.server.url]}
    options = {"update_weight_transport": "distributed", "start_timeout": 240, "call_timeout": 60}
    config = fleet_config(sglang_model, rollout=rollout, fleet=options)
    with Fleet.start(config, name="elsewhere", total_steps=2) as outside:
        version = train_once(outside)
        assert sync(outside) == [version]
        version = train_once(outside)
        send(outside, version, by("disk", tmp_path))
        verify(outside)
    assert engine.get_weight_version() == version


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("strike", "moment"),
    [
        (signal.SIGKILL, "after the meeting"),
        (signal.SIGSTOP, "after the meeting"),
        (signal.SIGKILL, "after the first bucket"),
    ],
)
def test_a_server_that_dies_or_hangs_in_an_update_is_replaced_and_the_trainer_goes_on(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, strike: signal.Signals
) -> None:
    version, training = train_once(fleet), fleet.training
    before = training.health()
    server = psutil.Process(fleet.rollout[0].health()["server_pid"])

    def hit(*_: object) -> None:
        for process in [*server.children(recursive=True), server]:
            process.send_signal(strike)

    meet_all = transports._meet

    def meet(*args: Any) -> None:
        meet_all(*args)
        hit()

    with monkeypatch.context() as patch:
        patch.setattr(TrainingHandle, "distributed_timeout", DEADLINE)
        if moment == "after the meeting":
            training.ask(WeightSource.leave_group)  # that of the last update
            patch.setattr(transports, "_meet", meet)
        else:
            patch.setattr(training, "broadcast_weights", after_the_first_bucket(training.broadcast_weights, hit))
        began = time.monotonic()
        with pytest.raises(EngineError):
            send(fleet, version, by("distributed", tmp_path, update_weight_buffer_size=100_000))
        assert time.monotonic() - began < 4 * DEADLINE + 60  # a call of its own that a stopped server does not answer
    assert train_once(fleet) == version + 1
    for engine in fleet.rollout:
        engine.ensure_alive()
    assert fleet.rollout[0].health()["server_pid"] != server.pid
    send(fleet, version + 1, by("distributed", tmp_path))
    verify(fleet)
    assert training.health()["pid"] == before["pid"]
