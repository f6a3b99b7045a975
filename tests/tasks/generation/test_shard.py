"""Samples are kept where they are generated: real engines in processes of their own."""

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any

import pyarrow as pa
import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fencing import Callee
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.types.errors import EngineDied, EngineError
from cairn.engines.types.keeping import KeeperRefused
from cairn.flows.iteration import plan_round
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.layout import attempts, run_manifest
from cairn.storage.logs.parts import read_any_part
from cairn.storage.store.errors import StoreRefused
from cairn.storage.store.local import LocalStore
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.generation import rollout as step
from cairn.tasks.generation.shard import Left, reached
from tests.tiny_run import Events, tiny_config, tiny_context
from tests.waiting import wait_for

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    """The first samples end long before the last ones begin."""
    return tiny_config(tiny_assets, rollout={"max_running_requests": 4, "n_samples_per_prompt": 32})


@pytest.fixture(scope="module")
def fleet(config: RunConfig, ray_cluster: Cluster) -> Iterator[Fleet]:
    with Fleet.start(config, name="shard", total_steps=3) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def content(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """Digest of the samples that the same engine generates in the driver's process."""
    with tiny_context(str(tmp_path_factory.mktemp("local")), config) as (run, _):
        return first_shard(run).table.content


def first_shard(run: RunContext) -> Commit:
    ((shard, part),) = plan_round(run, 0, None, None, 0)
    return step.rollout(run, 0, shard, None, [], [], **part)


def on_fleet(store: Path, config: RunConfig, fleet: Fleet) -> Any:
    return tiny_context(str(store), config, fleet=fleet)  # type: ignore[arg-type]


def parts(run: RunContext) -> list[str]:
    """Paths of the write-ahead parts of rollouts."""
    return [path for path in run.ledger.store.find(attempts(run.ledger.run, 0, Step.ROLLOUT)) if "write_ahead" in path]


def strike_once(run: RunContext, monkeypatch: pytest.MonkeyPatch, strike: Callable[[], None]) -> list[int]:
    """Strike when some samples of the first attempt are durable. Return a list to which each attempt appends the number
    of samples that it asks for."""
    generate, asked = step.generate_shard, list[int]()

    def struck(*args: Any) -> Iterator[Any]:
        for message in generate(*args):
            yield message
            if isinstance(message, Left):
                asked.append(sum(map(len, message.missing.values())))
            elif len(asked) == 1:
                wait_for(lambda: parts(run))
                strike()

    monkeypatch.setattr(step, "generate_shard", struck)
    return asked


def test_the_driver_writes_nothing_of_a_rollout_but_its_commit(
    config: RunConfig, fleet: Fleet, content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def noting(write: Any) -> Any:
        def noted(store: LocalStore, path: str, *args: Any) -> Any:
            written.append(path)
            return write(store, path, *args)

        return noted

    for name in ("write", "create"):
        monkeypatch.setattr(LocalStore, name, noting(getattr(LocalStore, name)))
    with on_fleet(tmp_path, config, fleet) as (run, _):
        commit = first_shard(run)
        assert commit.table.content == content
        assert written
        assert not [path for path in written if "/rollout/" in path]
        assert run.read(commit).num_rows == commit.metrics["samples"] == 128
        wait_for(lambda: not parts(run))


def test_what_an_engine_had_finished_when_it_died_is_not_generated_again(
    config: RunConfig, fleet: Fleet, content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_fleet(tmp_path, config, fleet) as (run, _):
        asked = strike_once(run, monkeypatch, lambda: os.kill(fleet.rollout[0].health()["pid"], signal.SIGKILL))
        with pytest.raises(EngineDied):
            first_shard(run)
        durable = sum(len(read_any_part(run.ledger.store, path) or ()) for path in parts(run))
        commit = first_shard(run)
    assert durable > 0
    assert asked == [128, 128 - durable]
    assert commit.table.content == content


def test_calls_of_an_engine_do_not_grow_with_the_shards_that_wait_for_it(
    tiny_assets: Path, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, call, engine = Counter[str](), Callee.call, fleet.rollout[0]
    gathered, shared = engine._keepers, list[int]()
    keep = gathered._call

    def counted(callee: Callee, method: Any, *args: Any, **kwargs: Any) -> Any:
        called[method.__name__] += 1
        return call(callee, method, *args, **kwargs)

    def sharing(makes: Any) -> Any:
        shared.append(len(makes))
        return keep(makes)

    monkeypatch.setattr(Callee, "call", counted)
    monkeypatch.setattr(gathered, "_call", sharing)
    contents = []
    for shards in (1, 4):
        config = tiny_config(tiny_assets, rollout={"max_running_requests": 4, "shards_per_round": shards})
        with on_fleet(tmp_path / str(shards), config, fleet) as (run, _), ThreadPoolExecutor(shards) as pool:
            planned = plan_round(run, 0, None, None, 0)
            fleet.weights.serve(engine, 0)
            called.clear()
            shared.clear()
            with engine.alone():
                steps = [pool.submit(step.rollout, run, 0, name, None, [], [], **part) for name, part in planned]
                wait_for(lambda asked=steps: sum(shared) + len(gathered._waiting) == len(asked))
            rows = pa.concat_tables([run.read(one.result()) for one in steps])
            contents.append(rows.select(["group_id", "sample_index", "response_ids"]).to_pylist())
        assert called == {"keep": len(shared)}
        assert (sum(shared), len(shared) <= 2) == (shards, True)
    assert contents[0] == contents[1]


def test_a_driver_keeps_the_samples_of_an_engine_that_lacks_its_key(
    config: RunConfig, fleet: Fleet, content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_fleet(tmp_path, config, fleet) as (run, events):
        monkeypatch.setenv("CAIRN_SIGNING_KEY", "key.pem")
        assert first_shard(run).table.content == content
        assert any("go through the driver" in text for text in messages(events))


NOBODY = 65534


def may_write(engine: Any, user: int) -> None:
    """Let an engine's process be of another user for what it reads and writes."""
    with pytest.raises(KeeperRefused):
        next(engine.keep(partial(_become, user)))


def _become(user: int) -> Any:
    os.seteuid(user)
    raise KeeperRefused


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder for a store that all users may read."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="changes the user of a process")
def test_an_engine_that_may_only_read_the_store_has_its_samples_go_through_the_driver(
    config: RunConfig, fleet: Fleet, content: str | None, open_folder: Path
) -> None:
    with on_fleet(open_folder, config, fleet) as (run, events):
        may_write(fleet.rollout[0], NOBODY)
        try:
            assert first_shard(run).table.content == content
        finally:
            may_write(fleet.rollout[0], 0)
        (text,) = (text for text in messages(events) if "go through the driver" in text)
        assert f"on {gethostname()}: cannot write {open_folder}" in text
        assert "permission is denied; check the folder's owner and mode" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="changes the user of a process")
def test_samples_go_through_the_driver_once_the_store_refuses_them_from_the_engine(
    config: RunConfig, fleet: Fleet, content: str | None, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_folder.chmod(0o777)
    with ExitStack() as stack:
        stack.callback(os.umask, os.umask(0))
        run, events = stack.enter_context(on_fleet(open_folder, config, fleet))

        def forbid() -> None:
            for folder in filter(Path.is_dir, (open_folder, *open_folder.rglob("*"))):
                folder.chmod(0o555)

        asked = strike_once(run, monkeypatch, forbid)
        may_write(fleet.rollout[0], NOBODY)
        stack.callback(may_write, fleet.rollout[0], 0)
        with pytest.raises(EngineError, match=f"on {gethostname()} cannot store its samples: cannot write"):
            first_shard(run)
        commit = first_shard(run)
        assert commit.table.content == content
        assert 0 < asked[1] < asked[0]
        assert any("go through the driver" in text for text in messages(events))


def test_a_store_that_was_not_reached_is_asked_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, manifest = str(tmp_path), run_manifest("late")
    with pytest.raises(StoreRefused, match="has no runs/late"):
        reached(url, manifest, "attempt")
    LocalStore(url).write(manifest, b"{}")
    with pytest.raises(StoreRefused, match="has no runs/late"):
        reached(url, manifest, "attempt")
    monkeypatch.setattr("cairn.tasks.generation.shard.REFUSED_SECONDS", 0.0)
    assert reached(url, manifest, "attempt").exists(manifest)


def messages(events: Events) -> list[str]:
    return [event.text for event in events if isinstance(event, Message)]
