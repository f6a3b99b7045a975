"""A fleet of real engines on a real cluster: what it adds to them, and what it does when one fails."""

import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from cairn.configs.plugins import BadPlugin
from cairn.engines.agents.episodes.user_code import SINGLE_TURN, GenerateFunction
from cairn.engines.fleet.calls import Deadline, map_in_threads
from cairn.engines.fleet.cluster import Cluster, ClusterError
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.fleet.handles import UPDATING
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.models.files import folder_digest
from cairn.engines.rollout.base import RolloutEngine
from cairn.engines.rollout.sglang.launch_plan import ServerPlan
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.training.base import TrainingEngine
from cairn.engines.training.torch.engine import TorchEngine
from cairn.engines.types.errors import (
    BadModel,
    EngineDied,
    EngineError,
    EngineTimeout,
    PublicationGone,
    RequestRefused,
    WeightsDiffer,
    WrongVersion,
)
from cairn.engines.types.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types.types import Completion, FinishReason, GenerateRequest, Publication, SamplingParams
from cairn.engines.weights.fingerprint import weights_checksum
from cairn.engines.weights.layout import StoredVersion, is_whole
from cairn.engines.weights.versions import read_version
from cairn.flows.driver.session import starting_fleet
from cairn.storage.opening import open_store
from cairn.storage.store.errors import NoSpace, StoreRefused
from cairn.tasks.durable.plugin_sources import source_digest
from tests.engines.training.builders import VOCABULARY, make_batch, model_folder
from tests.fleets import serve_all, sync, versions
from tests.ray_fixtures import fleet_config
from tests.requests import group
from tests.small_disk import small_disk, why_not
from tests.waiting import wait_for

TOTAL_STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fleet(model: Path, ray_cluster: Cluster) -> Iterator[Fleet]:
    in_one_bucket = {"update_weight_buffer_size": 2**20}  # that lies in the object store, and not with the driver
    config = fleet_config(model, rollout={"num_engines": 2}, fleet=in_one_bucket)
    with Fleet.start(config, name="fleet", total_steps=TOTAL_STEPS) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def initial(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Store with a checkpoint `initial` of the initial weights."""
    store = str(tmp_path_factory.mktemp("initial"))
    assert fleet.training.position().weight_version == 0
    fleet.training.save(store, "initial")
    return store


@pytest.fixture(autouse=True)
def _engines_alive(request: pytest.FixtureRequest) -> None:
    """Tests leave dead engines behind; the next one has the fleet put right as a step of a run does."""
    if "fleet" in request.fixturenames:
        fleet: Fleet = request.getfixturevalue("fleet")
        map_in_threads(fleet.rollout, RolloutHandle.ensure_alive)
        fleet.training.ensure_alive()


def requests(count: int = 5, max_new_tokens: int = 24) -> list[GenerateRequest]:
    draw = np.random.default_rng(count)
    params = SamplingParams(max_new_tokens)
    return [
        one
        for i in range(count)
        for one in group(i, draw.integers(VOCABULARY, size=3 + i).tolist(), range(i, i + 3), params)
    ]


def generate(engine: RolloutHandle | TransformersEngine, wanted: list[GenerateRequest]) -> list[Completion]:
    completions = [completion for part in engine.generate(wanted) for completion in part]
    return sorted(completions, key=lambda c: c.request_id)


def train_once(fleet: Fleet) -> int:
    version = fleet.training.position().weight_version
    fleet.training.train(make_batch(), num_steps=1, expected_version=version, input_digest=f"input {version}")
    return version + 1


def pid_of(fleet: Fleet, index: int) -> int:
    return fleet.rollout[index].health()["pid"]


FAILING = """
import os, torch

def loss(log_probs, tokens, config):
    if os.path.exists({marker!r}):
        os.remove({marker!r})
        raise torch.AcceleratorError({words!r})
    return -log_probs * tokens.advantages, {{}}
"""


@pytest.mark.proof
def test_an_error_of_the_gpu_on_all_ranks_is_a_death_and_the_update_succeeds_in_new_processes(
    model: Path, ray_cluster: Cluster, tmp_path: Path
) -> None:
    marker, code = tmp_path / "marker", tmp_path / "failing.py"
    code.write_text(FAILING.format(marker=str(marker), words="CUDA error: an illegal memory access was encountered"))
    config = fleet_config(model, algorithm={"loss_type": f"{code}:loss"})
    with Fleet.start(config, name="failing", total_steps=TOTAL_STEPS, trains_only=True) as fleet:
        before = fleet.training.health()["pid"]
        marker.touch()
        with pytest.raises(EngineDied, match=r"train\(\): the GPU failed.*illegal memory access"):
            train_once(fleet)
        with pytest.raises(EngineDied, match="illegal memory access"):
            fleet.training.health()
        assert fleet.training.ensure_alive()["pid"] != before
        assert train_once(fleet) == 1


@pytest.mark.proof
def test_a_training_engine_that_is_started_again_refuses_code_that_was_changed_meanwhile(
    model: Path, ray_cluster: Cluster, tmp_path: Path
) -> None:
    code, source = tmp_path / "mine.py", "def loss(log_probs, tokens, config):\n    return -log_probs, {}\n"
    code.write_text(source)
    config = fleet_config(model, algorithm={"loss_type": f"{code}:loss"})
    digests = {"model": folder_digest(model), "algorithm.loss_type:modules": source_digest(f"{code}:loss")}
    with starting_fleet(config, "changed", TOTAL_STEPS, digests, None, trains_only=True) as started:
        fleet = started()
        code.write_text(source.replace("-log_probs", "log_probs"))
        assert train_once(fleet) == 1, "it has the recorded code"
        with pytest.raises(BadPlugin, match=r"mine\.py:loss was changed while the run used it"):
            fleet.training.restart()
        code.write_text(source)
        fleet.training.restart()
        assert train_once(fleet) == 1


def hasty(fleet: Fleet, model: Path, index: int, *, timeout: float, call_timeout: float) -> RolloutHandle:
    """Another handle of the same engine, with other deadlines."""
    config = fleet_config(model, rollout={"timeout": timeout}, fleet={"call_timeout": call_timeout})
    actors = [fleet.rollout[index].actor]
    return RolloutHandle(f"rollout:{index}", actors, ServerPlan(), (str(model), "model"), config.rollout, config.fleet)


def test_samples_are_those_of_an_engine_without_a_fleet(fleet: Fleet, model: Path, initial: str) -> None:
    fleet.training.load(initial, "initial")
    sync(fleet)
    bare = generate(TransformersEngine(str(model), fleet_config(model).rollout), requests())
    for engine in fleet.rollout:
        for actual, expected in zip(generate(engine, requests()), bare, strict=True):
            np.testing.assert_array_equal(actual.response_ids, expected.response_ids)
            np.testing.assert_array_equal(actual.log_probs, expected.log_probs)
            assert (actual.finish_reason, set(actual.weight_versions)) == (expected.finish_reason, {0})


def test_training_and_scores_are_those_of_an_engine_without_a_fleet(fleet: Fleet, model: Path, initial: str) -> None:
    config = fleet_config(model)
    fleet.training.load(initial, "initial")
    engine = TorchEngine(config.model, config.training, config.algorithm, temperature=1.0, total_steps=TOTAL_STEPS)
    batch = make_batch()
    for actual, expected in zip(fleet.training.score(batch, "actor"), engine.score(batch, "actor"), strict=True):
        np.testing.assert_array_equal(actual, expected)
    arguments = {"num_steps": 1, "expected_version": 0, "input_digest": "an input"}
    expected_result = engine.train(batch, **arguments)
    result = fleet.training.train(batch, **arguments)
    assert replace(result, seconds=0) == replace(expected_result, seconds=0)
    position = fleet.training.position()
    assert (position.weight_version, position.last_input_digest) == (1, "an input")
    assert (position.state_digest, position.last_result) == (result.state_digest, result)


@pytest.mark.proof
def test_who_only_trains_gets_the_training_engine_alone_and_the_same_weights(ray_cluster: Cluster, model: Path) -> None:
    config = fleet_config(model, rollout={"num_engines": 2}, fleet={"colocate": True})
    engine = TorchEngine(config.model, config.training, config.algorithm, temperature=1.0, total_steps=TOTAL_STEPS)
    arguments = {"num_steps": 1, "expected_version": 0, "input_digest": "an input"}
    with Fleet.start(config, name="trainer", total_steps=TOTAL_STEPS, trains_only=True) as fleet:
        assert [engine.name for engine in fleet.engines] == ["training"]
        fleet.turns.for_training()
        result = fleet.training.train(make_batch(), **arguments)
    assert result.state_digest == engine.train(make_batch(), **arguments).state_digest


def test_what_an_engine_raises_comes_through_as_itself(fleet: Fleet) -> None:
    ahead = fleet.training.position().weight_version + 1
    with pytest.raises(WrongVersion, match=f"not at {ahead}") as raised:
        fleet.training.train(make_batch(), num_steps=1, expected_version=ahead, input_digest="")
    assert type(raised.value) is WrongVersion
    with pytest.raises(RequestRefused, match="7") as raised_by_rollout:
        generate(fleet.rollout[0], group(7, [VOCABULARY + 9], [1], SamplingParams(4)))
    assert type(raised_by_rollout.value) is RequestRefused
    assert len(generate(fleet.rollout[0], requests())) == 15


def test_an_engine_says_what_its_own_process_computes_on(fleet: Fleet, model: Path) -> None:
    here = TransformersEngine(str(model), fleet_config(model).rollout).environment()
    assert fleet.rollout[0].environment == here
    assert fleet.generating_environment(fleet.rollout[1]) == here
    assert fleet.training.environment.threads == fleet_config(model).training.num_threads


@pytest.mark.proof
def test_a_machine_with_another_model_than_the_runs_is_refused(ray_cluster: Cluster, model: Path) -> None:
    config, digest = fleet_config(model), folder_digest(model)
    with pytest.raises(
        BadModel, match=f"has loaded another model than the run's: the digest of {model} on .* copy the"
    ):
        Fleet.start(config, name="other", total_steps=1, model_digests={"model": "0" * 64, "data": "1" * 64})
    with Fleet.start(config, name="same", total_steps=1, model_digests={"model": digest, "data": "1" * 64}) as fleet:
        assert fleet.rollout[0].ask(RolloutEngine.get_weight_version) == 0


@pytest.mark.proof
def test_a_bad_model_folder_is_named_and_leaves_no_actor(ray_cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="nowhere does not exist"):
        Fleet.start(fleet_config(tmp_path / "nowhere"), name="bad", total_steps=1)

    def states() -> list[str]:
        return [g["state"] for g in ray.util.placement_group_table().values() if g["name"].startswith("cairn:bad:")]

    wait_for(lambda: not [name for name in ray.util.list_named_actors() if name.startswith("cairn:bad:")], 60)
    wait_for(lambda: states() == ["REMOVED", "REMOVED"], 60)


@pytest.mark.proof
def test_an_engine_that_does_not_start_in_time_says_so_itself(fleet: Fleet, model: Path) -> None:
    config = fleet_config(model, rollout={"engine": "sglang"})
    nobody = ServerPlan(external_url="http://127.0.0.1:1")
    actors = fleet.rollout[0]._actors
    engine = RolloutHandle("rollout:0", actors, nobody, (str(model), "model"), config.rollout, config.fleet)
    with pytest.raises(EngineTimeout, match=r"127\.0\.0\.1:1 did not serve within .* take it out of"):
        engine._make_engine(Deadline(2))


def test_gpus_that_the_cluster_lacks_are_refused_at_once_with_what_it_has(
    ray_cluster: Cluster, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fleet_config(model, rollout={"num_engines": 2, "num_gpus_per_engine": 64})
    monkeypatch.setattr(ray_cluster, "start_workers_with", lambda num_threads: None)  # engines with GPUs are no forks
    with pytest.raises(
        ClusterError, match=r"rollout 2 × \(1 CPU, 64 GPU\).*it has 16 CPU.*rollout.num_gpus_per_engine"
    ):
        Fleet.start(config, name="gpus", total_steps=1)


@pytest.mark.proof
def test_a_killed_rollout_engine_is_an_error_that_names_it_and_is_replaced_by_the_base_model(
    fleet: Fleet, capfd: pytest.CaptureFixture[str]
) -> None:
    version = train_once(fleet)
    sync(fleet)
    engine, pid = fleet.rollout[0], pid_of(fleet, 0)
    stream = engine.generate(requests(64, max_new_tokens=200))
    next(stream)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="cairn:fleet:rollout:0"):
        list(stream)
    assert isinstance(fleet.health()["rollout:0"], EngineDied)
    reported: list[str] = []
    engine.report = reported.append
    engine.ensure_alive()
    (sentence,) = reported
    assert sentence.startswith("Engine rollout:0 is restarted: cairn:fleet:rollout:0.health(): ")
    assert versions(fleet) == [0, version]
    assert sync(fleet) == [version, version]
    assert {int(v) for completion in generate(engine, requests()) for v in completion.weight_versions} == {version}
    assert capfd.readouterr().out == ""  # it belongs to the command


@pytest.mark.slow
def test_a_stopped_rollout_engine_is_a_timeout_and_is_killed_hard(fleet: Fleet, model: Path) -> None:
    engine = hasty(fleet, model, 1, timeout=600, call_timeout=2)
    process = psutil.Process(pid_of(fleet, 1))
    process.suspend()
    with pytest.raises(EngineTimeout, match="cairn:fleet:rollout:1"):
        generate(engine, requests())
    fleet.rollout[1].restart()
    assert pid_of(fleet, 1) != process.pid
    assert not process.is_running()
    assert len(generate(fleet.rollout[1], requests())) == 15


@pytest.mark.proof
def test_a_generation_that_takes_too_long_is_a_timeout_and_its_engine_is_replaced(fleet: Fleet, model: Path) -> None:
    engine, pid = hasty(fleet, model, 0, timeout=0.2, call_timeout=30), pid_of(fleet, 0)
    with pytest.raises(EngineTimeout, match=r"within 0\.2 s"):
        generate(engine, requests(64, max_new_tokens=200))
    engine.ensure_alive()
    assert engine.health()["pid"] != pid


@pytest.mark.proof
def test_what_an_engine_generates_for_a_stream_lasts_as_long_as_it_gets_work_and_weights(
    fleet: Fleet, model: Path
) -> None:
    engine, timeout = hasty(fleet, model, 0, timeout=3.0, call_timeout=30), 3.0
    engine._config = engine._config.model_copy(update={"pipeline": "streaming"})
    sync(fleet)
    version = train_once(fleet)
    fleet.weights.publish(version, keep=2)
    numbers = itertools.count()

    def some() -> list[SampleRequest]:
        return [SampleRequest(next(numbers), 0, [5, 6, 7], seed) for seed in range(4)]

    def generate_all() -> list[GeneratedSample]:
        streamed = engine.generate_samples(some(), SamplingParams(200), GenerateFunction(SINGLE_TURN))
        return [sample for reported in streamed if isinstance(reported, list) for sample in reported]

    with ThreadPoolExecutor(1) as pool:
        generated = pool.submit(generate_all)
        began, joined = time.monotonic(), 0
        while not joined or time.monotonic() - began < 2 * timeout:
            if engine.join(some()):
                joined += 1
            elif generated.done():  # before others came: from the beginning
                generated = pool.submit(generate_all)
                began, joined = time.monotonic(), 0
            time.sleep(0.05)
        fleet.weights.update(engine, version)
        assert engine._deadline.remaining > 0.8 * timeout
        assert len(generated.result(60)) == 4 * (1 + joined)
    assert engine.ask(RolloutEngine.get_weight_version) == version


@pytest.mark.proof
def test_an_engine_is_free_after_a_generation_that_was_given_up(fleet: Fleet) -> None:
    engine, pid = fleet.rollout[0], pid_of(fleet, 0)
    stream = engine.generate(requests(64, max_new_tokens=200))
    next(stream)
    stream.close()
    assert engine.health()["running_requests"] == 0
    assert len(generate(engine, requests())) == 15
    engine.ensure_alive()
    assert engine.health()["pid"] == pid


@pytest.mark.proof
def test_an_abort_ends_the_stream_with_every_sample_as_far_as_it_came(fleet: Fleet) -> None:
    engine = fleet.rollout[0]
    requested = requests(64, max_new_tokens=200)
    for _ in range(20):  # who hears late of the first ones may abort when all have ended
        done: list[Completion] = []
        for completions in engine.generate(requested):
            done += completions
            if not any(c.finish_reason == FinishReason.ABORT for c in done):
                engine.abort()
        assert {c.request_id for c in done} == {request.request_id for request in requested}
        if aborted := any(c.finish_reason == FinishReason.ABORT for c in done):
            break
    assert aborted
    assert len(generate(engine, requests())) == 15, "an abort ends that generation alone"


@pytest.mark.proof
def test_a_killed_trainer_is_an_error_and_restarts_at_the_initial_weights(fleet: Fleet, initial: str) -> None:
    fleet.training.load(initial, "initial")
    before = fleet.training.position()
    train_once(fleet)
    os.kill(fleet.training.health()["pid"], signal.SIGKILL)
    with pytest.raises(EngineDied, match="cairn:fleet:training:0"):
        fleet.training.position()
    fleet.training.ensure_alive()
    assert fleet.training.position() == before


@pytest.mark.proof
def test_an_engine_serves_what_was_published_while_the_trainer_goes_on(fleet: Fleet) -> None:
    version = train_once(fleet)
    published = fleet.weights.publish(version, keep=2)
    assert published == Publication(version, fleet.training.weights_checksum())
    train_once(fleet)
    first, second = fleet.rollout
    os.kill(first.health()["pid"], signal.SIGKILL)
    trained = fleet.training.position()
    with second.alone():  # it works, and is not asked
        fleet.weights.serve(first, version)
    checksums = [engine.ask(RolloutEngine.weights_checksum) for engine in (first, second)]
    assert checksums[0] == published.digest != checksums[1]
    assert {int(v) for completion in generate(first, requests()) for v in completion.weight_versions} == {version}
    assert fleet.training.position() == trained


@pytest.mark.proof
def test_publications_stay_after_the_trainer_died_and_go_when_newer_ones_are_as_many(fleet: Fleet) -> None:
    first = train_once(fleet)
    fleet.weights.publish(first, keep=2)
    os.kill(fleet.training.health()["pid"], signal.SIGKILL)
    assert serve_all(fleet, first) == [first, first]
    fleet.training.ensure_alive()
    with pytest.raises(WrongVersion, match=f"at weight version 0, not at {first}"):
        fleet.weights.publish(first, keep=2)
    fleet.weights.publish(0, keep=2)
    assert fleet.weights.published() == {first, 0}
    fleet.weights.publish(train_once(fleet), keep=2)
    assert fleet.weights.published() == {0, 1}
    fleet.rollout[0].restart()
    gone = first + 7
    with pytest.raises(PublicationGone, match=rf"weight version {gone} is not published any more \(published: 0, 1\)"):
        fleet.weights.serve(fleet.rollout[0], gone)
    assert versions(fleet)[0] == 0, "nothing was begun"


def test_an_engine_begins_a_broken_off_update_again_and_is_left_alone_where_it_serves_the_version(fleet: Fleet) -> None:
    version = train_once(fleet)
    sync(fleet)
    fleet.rollout[1].call(UPDATING, RolloutEngine.begin_weight_update, version).result()
    assert versions(fleet) == [version, None]
    with fleet.rollout[0].alone():  # an update would wait for it
        assert serve_all(fleet, version) == [version, version]


def test_engines_with_other_weights_than_were_published_serve_nothing_and_are_not_trusted_with_earlier_ones(
    fleet: Fleet,
) -> None:
    older = train_once(fleet)
    sync(fleet)
    version = train_once(fleet)
    fleet.weights.publish(version, keep=2)
    _, stored = fleet.weights._find(older)
    publication, _ = fleet.weights._find(version)
    fleet.weights._stored[version] = (publication, stored)
    with pytest.raises(WeightsDiffer, match=f"rollout:0 received weights .* version {version} was published with"):
        fleet.weights.serve(fleet.rollout[0], version, beside=fleet.rollout)
    assert versions(fleet) == [None, None]
    assert version not in fleet.weights.published()
    for engine in fleet.rollout:
        fleet.weights.serve(engine, older, checked_within=600)
    assert versions(fleet) == [older, older]


SEVERAL_FILES = """
from cairn.engines.weights import versions

versions.FILE_BYTES = 50_000


def loss(log_probs, tokens, config):
    return -log_probs * tokens.advantages, {}
"""
"""A loss of the user's, which every rank imports."""


@pytest.mark.slow
def test_two_ranks_write_a_version_in_turn_and_whole_where_one_of_them_lacks_the_version_before(
    ray_cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    (code := tmp_path / "several_files.py").write_text(SEVERAL_FILES)
    config = fleet_config(model, training={"world_size": 2}, algorithm={"loss_type": f"{code}:loss"})
    store, versions, digests = open_store(str(tmp_path)), list[StoredVersion](), list[str]()
    with Fleet.start(config, name="writers", total_steps=TOTAL_STEPS) as fleet:
        training = fleet.training

        def copy(base: str | None) -> None:
            """Make an update, and copy the weights to be written as the difference to the version `base`."""
            before = training.position().weight_version
            training.train(make_batch(), num_steps=1, expected_version=before, input_digest=str(before))
            digests.append(training.checksum_at(before + 1, "bfloat16"))
            training.copy_version(before + 1, "bfloat16", digests[-1], base)

        def write(folder: str, *, whole: bool) -> None:
            files = training.write_version(str(tmp_path), folder)
            assert is_whole(files) is whole
            assert len({re.sub(r"-\d+\.safetensors", "", file.path) for file in files}) == 2, "each rank wrote some"
            versions[:] = [*([] if whole else versions), StoredVersion(folder, digests[-1], tuple(files))]
            assert weights_checksum(read_version(store, versions).items()) == digests[-1]

        copy(None)
        write("first", whole=True)
        copy(digests[-1])
        (tmp_path / "second/difference-00001-00001.safetensors").mkdir(parents=True)
        with pytest.raises(StoreRefused, match="difference-00001-00001"):
            training.write_version(str(tmp_path), "second")  # the first rank has written its files
        assert training.holds_version(2, digests[-1])
        write("again", whole=False)
        copy(digests[-1])
        (tmp_path / "third/difference-00001-00001.safetensors").mkdir(parents=True)
        with pytest.raises(StoreRefused, match="difference-00001-00001"):
            training.write_version(str(tmp_path), "third")
        copy(digests[-1])  # the first rank alone has written that version
        write("fourth", whole=True)


@pytest.mark.slow
def test_two_training_ranks_hold_one_state_and_die_together(ray_cluster: Cluster, model: Path, tmp_path: Path) -> None:
    config = fleet_config(model, training={"world_size": 2})
    single = TorchEngine(
        config.model, fleet_config(model).training, config.algorithm, temperature=1.0, total_steps=TOTAL_STEPS
    )
    with Fleet.start(config, name="ranks", total_steps=TOTAL_STEPS) as fleet:
        training, batch = fleet.training, make_batch()
        assert training.position() == single.position()
        for actual, expected in zip(training.score(batch, "actor"), single.score(batch, "actor"), strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-5)
        result = training.train(batch, num_steps=1, expected_version=0, input_digest="x")
        expected_result = single.train(batch, num_steps=1, expected_version=0, input_digest="x")
        assert result.metrics["loss"] == pytest.approx(expected_result.metrics["loss"], abs=1e-5)
        assert sync(fleet) == [1]
        with pytest.raises(WrongVersion):
            training.train(batch, num_steps=1, expected_version=0, input_digest="y")
        pids = training.health()["pids"]
        training.ensure_alive()
        assert training.health()["pids"] == pids

        position = training.position()
        with pytest.raises(EngineError, match="different states"):
            training.agreed([position, replace(position, state_digest="another")], lambda p: p.state_digest)
        training.ensure_alive()
        restarted = training.health()["pids"]
        assert not set(pids) & set(restarted)
        assert training.position().weight_version == 0

        if why_not() is None:
            with (
                small_disk(tmp_path / "disk", 2**14) as disk,
                pytest.raises(NoSpace, match=rf"cannot write {disk}/\S+: no space is left"),  # the other merely waited
            ):
                training.save(str(disk), "checkpoint")

        os.kill(restarted[1], signal.SIGSTOP)
        calls = training.call_all(None, TrainingEngine.position)
        with pytest.raises(
            EngineTimeout, match="not return within 2 s after the other ranks from cairn:ranks:training:1"
        ):
            training._gather(calls, Deadline(600), spread=2)

        os.kill(restarted[1], signal.SIGKILL)
        with pytest.raises(EngineDied, match="cairn:ranks:training:1"):
            training.train(batch, num_steps=1, expected_version=0, input_digest="y")
