"""Episodes in a run that streams: turns are recorded as they come, whatever ends the driver."""

import os
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.types.places import split_place
from cairn.engines.types.trajectories import CallRecord
from cairn.engines.types.types import Completion, FinishReason, GenerateRequest, RequestId
from cairn.storage.ledger import snapshots as tables
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.layout import CALLS_FILE
from cairn.storage.upkeep.verification import verify
from cairn.tasks.durable.context import RunContext
from cairn.tasks.generation.calls import call_records, read_calls
from cairn.tasks.generation.groups import row_segments
from cairn.tasks.trainer.recovery import restore_trainer
from tests.chaos.in_process import EndingAt, drive
from tests.flows.test_streaming import streaming
from tests.forks import FORKS
from tests.tiny_run import DirectSteps, tiny_context
from tests.waiting import wait_for

AGENT = '''
import asyncio
from pathlib import Path

import cairn

PAID = Path(__file__).with_name("paid")


def done(intent):
    """Whether it was, as a service of payments would know."""
    return "paid" if PAID.exists() and intent.key in PAID.read_text().split() else cairn.NOT_DONE


@cairn.tool(kind="effects", reconcile=done)
async def pay(idempotency_key: str) -> str:
    with PAID.open("a") as file:
        file.write(f"{idempotency_key}\\n")
    await asyncio.sleep(0.2)
    return "paid"


async def generate(ctx, sample):
    """Three turns, with a payment after each of the first two."""
    segments = []
    before = list(sample.prompt_ids)
    for turn in range(3):
        segments.append(await ctx.sample(before, max_new_tokens=6))
        if turn < 2:
            await ctx.call(pay, {})
            segments.append(cairn.Segment.given([5, 6 + turn]))
        before += [id for segment in segments[-2:] for id in segment.ids]
    return cairn.Trajectory(segments)
'''
ITERATIONS = 3
SAMPLES = 2 * ITERATIONS * 4


def paying(assets: Path, folder: Path) -> RunConfig:
    (folder / "agent.py").write_text(AGENT)
    agent = {"num_rollout": ITERATIONS, "custom_generate_function_path": f"{folder / 'agent.py'}:generate"}
    config = streaming(assets, 1, checkpoint={"save_interval": 2})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=agent)})


def paid(folder: Path) -> Counter[str]:
    file = folder / "paid"
    return Counter(file.read_text().split() if file.exists() else [])


def turns(run: RunContext) -> dict[int | None, list[int]]:
    """What the policy answered, by the seeds of its calls, of all that is committed."""
    found = {}
    for index in range(ITERATIONS):
        commit = run.committed(index, Step.ROLLOUT, "00-000")
        calls, results = run.calls(commit) or (None, None)
        assert calls is not None
        rows = run.read(commit).to_pylist()
        assert all(row["error"] is None for row in rows)
        segments = {(row["group_id"], row["sample_index"]): row_segments(row) for row in rows}
        found |= answers(read_calls(calls, results, segments))
    return found


def recorded(store: Path) -> dict[int | None, list[int]]:
    """The same of what lies in the logs of drivers."""
    parts = sorted((store / "runs/tiny/stream").rglob("write_ahead/calls/*.arrow"))
    return answers(chain(*(call_records(tables.from_ipc(path.read_bytes())) for path in parts)))


def answers(records: Iterable[CallRecord]) -> dict[int | None, list[int]]:
    segments = [record.segment for record in records if record.segment is not None]
    return {segment.seed: segment.ids.tolist() for segment in segments}


def count_answers(run: RunContext) -> Counter[int]:
    """How often the engine of a run answers each call of the policy to its end, from now on, by the call's seed."""
    (engine,) = run.fleet.rollout
    begin, found = engine.open, Counter[int]()

    class Counting:
        def __init__(self) -> None:
            self._stream = begin()
            self._seeds: dict[RequestId, int] = {}

        def submit(self, requests: Sequence[GenerateRequest]) -> None:
            self._seeds |= {request.request_id: request.seed for request in requests}
            self._stream.submit(requests)

        def __iter__(self) -> "Counting":
            return self

        def __next__(self) -> list[Completion]:
            completions = next(self._stream)
            whole = [one for one in completions if one.finish_reason is not FinishReason.ABORT]
            found.update(self._seeds[one.request_id] for one in whole)
            return completions

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

    engine.open = Counting  # type: ignore[method-assign, assignment]
    return found


def be_killed(store: str, config: RunConfig, logged: int) -> None:
    with tiny_context(store, config) as (run, _):

        def die() -> None:
            wait_for(lambda: len(recorded(Path(store))) >= logged, 60)
            os.kill(os.getpid(), signal.SIGKILL)

        drive(run, EndingAt(run, 0, Step.ROLLOUT, "before", die))


@pytest.mark.proof
def test_episodes_go_on_from_their_records_after_their_driver_was_killed(tiny_assets: Path, tmp_path: Path) -> None:
    config, store = paying(tiny_assets, tmp_path), tmp_path / "store"
    driver = FORKS.Process(target=be_killed, args=(str(store), config, 4))
    driver.start()
    driver.join(200)
    assert driver.exitcode == -signal.SIGKILL
    known = recorded(store)
    assert known
    with tiny_context(str(store), config) as (run, _):
        answered = count_answers(run)
        drive(run, DirectSteps(run))
        taken = [run.committed(index, Step.ROLLOUT, "00-000") for index in range(ITERATIONS)]
        assert sorted(chain(*(commit.values["groups"] for commit in taken))) == list(range(2 * ITERATIONS))
        found = turns(run)
        assert len(found) == 3 * SAMPLES
        assert {seed: found[seed] for seed in known} == known
        assert not answered.keys() & known.keys(), "a turn that was recorded is sampled again"
        assert answered.keys() | known.keys() == found.keys()
        assert set(answered.values()) == {1}, "a turn is sampled again after an interruption"
        assert sum(commit.metrics["tool_calls"] for commit in taken) == 2 * SAMPLES
    assert len(paid(tmp_path)) == 2 * SAMPLES
    assert set(paid(tmp_path).values()) == {1}, "an effect was repeated"
    assert not list((store / "runs/tiny/stream").rglob("*.arrow")), "the log keeps what commits have"
    assert all(CALLS_FILE in {output.path.rpartition("/")[2] for output in commit.outputs} for commit in taken)
    assert not [finding for verified in verify(run.ledger) for finding in verified.findings]
    with tiny_context(str(store), config) as (run, _):  # every update again, from what was committed
        restore_trainer(run, run.committed(ITERATIONS - 1, Step.TRAIN))


def test_a_group_of_which_an_episode_has_failed_is_taken_when_nothing_of_it_acts_any_more(
    tiny_assets: Path, tmp_path: Path
) -> None:
    config = paying(tiny_assets, tmp_path)
    alone = {"num_rollout": 1, "rollout_batch_size": 1}
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update=alone)})
    fails = '    if sample.key == (0, 0):\n        raise ValueError("it is broken")\n    segments = []'
    (tmp_path / "agent.py").write_text(AGENT.replace("    segments = []", fails))
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        drive(run, DirectSteps(run))
        takes = [commit for commit in run.ledger.commits(0) if commit.step is Step.ROLLOUT]
        (failed,) = [commit for commit in takes if 0 in commit.values["groups"]]
        rows = run.read(failed).filter(pc.field("group_id") == 0).to_pylist()
        assert [split_place(row["error"])[0] for row in rows] == ["generate: ValueError: it is broken"] * 4
        calls, _ = run.calls(failed) or (None, None)
        assert calls is not None
        made = calls.filter((pc.field("group_id") == 0) & (pc.field("kind") == "tool"))
        assert made["order"].null_count == 0
        assert made.num_rows == 2 * 3 == sum(key.split("/")[-3] == "0" for key in paid(tmp_path))
