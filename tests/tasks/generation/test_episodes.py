"""Episodes in a run: what its driver's end leaves of them, what is committed, and what comes of doing it again."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.types.trajectories import CallKind, CallRecord
from cairn.flows.history.replay import Replaying
from cairn.flows.iteration import iteration
from cairn.storage.ledger import snapshots as tables
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.layout import CALLS_FILE, RESULTS_FILE
from cairn.storage.logs.call_log import CallLog
from cairn.storage.opening import open_store
from cairn.storage.store.errors import StoreError
from cairn.tasks.durable.context import RunContext
from cairn.tasks.generation.calls import LONG, call_table, read_calls, uncertain_effects
from cairn.tasks.generation.groups import row_segments
from tests.local_fleet import LocalFleet, dying_after
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

AGENT = '''
import asyncio

import cairn


@cairn.tool(kind="effects")
async def pay(folder: str, sample: str) -> str:
    with open(f"{folder}/paid", "a") as file:
        file.write(f"{sample}\\n")
    return "paid " * 300


@cairn.tool(kind="pure")
async def look(word: str) -> str:
    return word.upper()


async def generate(ctx, sample):
    """Two turns, the second after what two tools say that are asked side by side; and a part that nobody trains on."""
    first = await ctx.sample(sample.prompt_ids)
    place = f"{sample.group_id}/{sample.index}"
    paid, seen = await asyncio.gather(
        ctx.call(pay, {"folder": FOLDER, "sample": place}), ctx.call(look, {"word": f"{len(first)}"})
    )
    await ctx.sample([*sample.prompt_ids, 5], max_new_tokens=3)
    world = cairn.Segment.given(ctx.tokenizer.encode(f"{len(paid)} {seen}", add_special_tokens=False))
    second = await ctx.sample([*sample.prompt_ids, *first.ids, *world.ids])
    return cairn.Trajectory([first, world, second])
'''


def agent_config(assets: Path, folder: Path) -> RunConfig:
    folder.mkdir(exist_ok=True)
    (folder / "agent.py").write_text(AGENT.replace("FOLDER", repr(str(folder))))
    option = {"custom_generate_function_path": f"{folder / 'agent.py'}:generate", "num_rollout": 1}
    return tiny_config(assets, rollout=option)


def one_iteration(config: RunConfig, store: Path, fleet: Any = None) -> RunContext:
    with tiny_context(str(store), config, **({} if fleet is None else {"fleet": fleet})) as (run, _):
        iteration(run, DirectSteps(run), 0)
    return run


def rollout(run: RunContext) -> Commit:
    return run.committed(0, Step.ROLLOUT, "00-000")


def paid(folder: Path) -> Counter[str]:
    file = folder / "paid"
    return Counter(file.read_text().split() if file.exists() else [])


@pytest.fixture(scope="module")
def whole(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunContext, Path]:
    """A run of an iteration that nobody disturbed, and the folder of its code."""
    folder = tmp_path_factory.mktemp("agent")
    return one_iteration(agent_config(tiny_assets, folder), folder / "store"), folder


@pytest.mark.proof
def test_all_that_code_was_given_is_committed_once(whole: tuple[RunContext, Path]) -> None:
    run, _ = whole
    commit = rollout(run)
    calls, results = run.calls(commit) or (None, None)
    assert calls is not None
    assert results is not None
    assert results["result"].to_pylist() == ['"' + "paid " * 300 + '"']
    assert {name for row in calls.to_pylist() if (name := row["result_digest"])} == {*results["sha256"].to_pylist()}
    samples = run.read(commit).to_pylist()
    without_tokens = [row for row in calls.to_pylist() if row["kind"] == "sample" and row["response_ids"] is None]
    assert len(without_tokens) == 2 * len(samples), "what the trajectory has is there twice"
    segments = {(row["group_id"], row["sample_index"]): row_segments(row) for row in samples}
    for key, own in segments.items():
        mine = [one for one in read_calls(calls, results, segments) if one.key == key]
        recorded = {(one.call, one.kind, one.order is None) for one in mine}
        tools = {(name, CallKind.TOOL, False) for name in ("t0.c0", "t1.c0")}
        assert recorded == tools | {(name, CallKind.SAMPLE, False) for name in ("0", "1", "2")}
        assert sorted(one.order for one in mine if one.order is not None) == [*range(5)]
        sampled = {one.call: one.segment for one in mine if one.kind is CallKind.SAMPLE}
        for segment in own:
            if segment.call is not None:
                assert (found := sampled[segment.call]) is not None
                assert found.ids.tolist() == segment.ids.tolist()
                assert found.seed == segment.seed
        assert all(len(one.result or "") > LONG for one in mine if one.name == "pay" and one.order is not None)


@pytest.mark.slow
def test_a_killed_driver_costs_what_was_under_way_and_no_effect_is_repeated(
    whole: tuple[RunContext, Path], tiny_assets: Path, tmp_path: Path
) -> None:
    expected, _ = whole
    config = agent_config(tiny_assets, tmp_path)
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    fleet = dying_after(LocalFleet(config), 2 * samples)
    with tiny_context(str(tmp_path / "store"), config, fleet=fleet) as (run, _), pytest.raises(KeyboardInterrupt):
        iteration(run, DirectSteps(run), 0)
    before = paid(tmp_path)
    assert before
    parts = [tables.from_ipc(file.read_bytes()) for file in (tmp_path / "store").rglob("write_ahead/calls/*.arrow")]
    rows = [row for part in parts for row in part.to_pylist() if row["order"] is not None]
    durable = Counter(row["kind"] for row in rows)
    assert durable["sample"] >= samples
    sampled = 0

    class Counting(LocalFleet):
        def __init__(self, config: RunConfig) -> None:
            super().__init__(config)
            engine = self.rollout[0]
            stream = engine.open

            def open() -> Any:
                opened = stream()
                submit = opened.submit

                def counting(requests: Any) -> None:
                    nonlocal sampled
                    sampled += len(requests)
                    submit(requests)

                opened.submit = counting
                return opened

            engine.open = open  # type: ignore[method-assign]

    run = one_iteration(config, tmp_path / "store", Counting(config))
    effects = paid(tmp_path)
    assert set(effects.values()) == {1}, "an effect was repeated"
    assert len(effects) == samples
    assert sampled == 3 * samples - durable["sample"], "what had been sampled was sampled again"
    assert train_digests(run, [0]) == train_digests(expected, [0])
    files = {output.path.rpartition("/")[2]: output for output in rollout(run).outputs}
    assert files.keys() == {"samples.parquet", CALLS_FILE, RESULTS_FILE}


@pytest.mark.slow
def test_calls_that_cannot_be_logged_end_the_step_though_all_episodes_wait_for_that(
    ray_cluster: Cluster, tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = agent_config(tiny_assets, tmp_path)
    assert config.rollout.custom_generate_timeout > 300, "longer than this test may take"
    write = CallLog._write_part

    def down(log: CallLog, table: pa.Table, *args: Any, **options: Any) -> None:
        if table.num_rows:
            time.sleep(2)  # in which all of them come to their effects
            raise StoreError("the store is down")
        write(log, table, *args, **options)

    monkeypatch.setattr(CallLog, "_write_part", down)
    with Fleet.start(config, name="tiny", total_steps=1) as fleet, pytest.raises(StoreError, match="the store is down"):
        one_iteration(config, tmp_path / "store", fleet)
    assert not paid(tmp_path)


@pytest.mark.proof
def test_doing_a_rollout_again_samples_and_gives_tools_answers_from_the_record(
    whole: tuple[RunContext, Path], tmp_path: Path
) -> None:
    run, folder = whole
    before = paid(folder)
    with tiny_context(str(folder / "store"), run.config) as (other, _):
        runner = Replaying(other, {Step.ROLLOUT}, None, open_store(str(tmp_path)))
        iteration(other, runner, 0)
        (engine,) = other.fleet.rollout
    (replayed,) = runner.replayed
    assert replayed.skipped is None
    assert replayed.differences == ()
    assert engine.generated_groups
    assert paid(folder) == before


def test_effects_that_nobody_looked_up_are_named_by_their_samples() -> None:
    def pay(index: int, call: str, order: int | None = None) -> CallRecord:
        return CallRecord(3, index, call, CallKind.TOOL, "pay", "d", order, arguments='{"to":"x"}')

    answered = [pay(0, "c0"), pay(0, "c0", 1)]
    errors = uncertain_effects(call_table([*answered, pay(1, "c0"), pay(1, "c0", 0), pay(1, "c1")]))
    assert errors.keys() == {(3, 1)}
    assert 'call c1 (tool pay) with {"to":"x"} was under way when its process was lost' in errors[3, 1]
    assert uncertain_effects(call_table(answered)) == {}
