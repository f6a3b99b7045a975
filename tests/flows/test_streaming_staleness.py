"""A run that streams, and a prompt that takes longer than `rollout.timeout`: its group is too old when it is taken."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fleet import Fleet
from cairn.flows.history.replay import UPDATES, newest_update, replay_all, replayed_weights
from cairn.flows.reading.metrics import iteration_metrics
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.upkeep.verification import verify
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.selection import last_selection
from cairn.tasks.durable.step import DurableStep
from tests.chaos.in_process import drive
from tests.flows.test_streaming import streaming
from tests.tiny_run import DirectSteps, tiny_context

AGENT = '''
import asyncio
from pathlib import Path

import cairn

SEEN = Path(__file__).with_name("seen")


async def generate(ctx, sample):
    """Two turns. Between those of the first group it waits for something that its world tells it late."""
    first = await ctx.sample(sample.prompt_ids, max_new_tokens=4)
    while sample.key[0] == 0 and not SEEN.exists():
        await asyncio.sleep(0.02)
    return cairn.Trajectory([first, await ctx.sample([*sample.prompt_ids, *first.ids], max_new_tokens=4)])
'''
ITERATIONS, MAX_AGE, TIMEOUT = 3, 1, 3.0
LATE = 0
"""The slow group: it is too old for iteration 2, so that iteration 1 waits for it as long as it may."""


class Seen(DirectSteps):
    """The slow episodes go on when iteration 1 has given them up."""

    def __init__(self, run: RunContext, seen: Path) -> None:
        super().__init__(run)
        self._seen = seen

    def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        if (index, step.name) == (2, Step.ROLLOUT):
            self._seen.touch()
        return super().call(step, index, shard, *args, **kwargs)


@pytest.fixture
def config(tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")  # what a replay may load is there
    (tmp_path / "agent.py").write_text(AGENT)
    config = streaming(tiny_assets, MAX_AGE, fleet={"start_timeout": 240, "call_timeout": 60})
    slow = {
        "num_rollout": ITERATIONS,
        "timeout": TIMEOUT,
        "staleness_policy": "decay",
        "custom_generate_function_path": f"{tmp_path / 'agent.py'}:generate",
    }
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=slow)})


@pytest.fixture
def fleet(config: RunConfig, ray_cluster: Cluster) -> Iterator[Fleet]:
    with Fleet.start(config, name="stale", total_steps=ITERATIONS) as fleet:
        yield fleet


@pytest.mark.slow
def test_a_group_that_is_too_old_when_it_is_taken_counts_less_and_so_it_does_again(
    config: RunConfig, fleet: Fleet, tmp_path: Path
) -> None:
    with tiny_context(str(tmp_path / "store"), config, fleet=fleet) as (run, _):  # type: ignore[arg-type]
        drive(run, Seen(run, tmp_path / "seen"))
        earlier, taken = (run.committed(index, Step.ROLLOUT, "00-000") for index in (1, 2))
        assert LATE not in earlier.values["groups"]
        assert earlier.timings["wait"] >= TIMEOUT
        assert LATE in taken.values["groups"]
        rows = [row for row in run.read(taken).to_pylist() if row["group_id"] == LATE]
        assert len(rows) == 4
        assert {version for row in rows for version in row["weight_versions"][:4]} == {0}
        assert all(min(row["weight_versions"][4:]) >= 1 for row in rows), "they waited"

        selection = last_selection(run, 2)
        judged = {row["group_id"]: row for row in run.read(selection).to_pylist()}
        assert (judged[LATE]["disposition"], judged[LATE]["max_age"]) == ("train", MAX_AGE)
        assert judged[LATE]["stale_tokens"] == 16
        assert judged[LATE]["stale_weights"] == [0.5]
        assert [row["stale_weights"] for id, row in judged.items() if id != LATE] == [None]
        estimated = run.committed(2, Step.ADVANTAGE)
        weighed = [row for row in run.read(estimated).to_pylist() if row["group_id"] == LATE]
        assert all(row["ages"][:4] == [2] * 4 and max(row["ages"][4:]) <= MAX_AGE for row in weighed)
        for row in weighed:
            np.testing.assert_allclose(row["advantages"][:4], [0.5 * row["advantages"][-1]] * 4, rtol=1e-6)
        assert any(row["advantages"][-1] for row in weighed)
        shown = iteration_metrics([taken, selection, estimated], config)
        assert (shown["age/stale_tokens"], shown["age/down_weighted_tokens"], shown["age/masked_tokens"]) == (16, 16, 0)
        assert shown["age/max"] == 2

        assert not [finding.message for checked in verify(run.ledger) for finding in checked.findings]
        weights = replayed_weights(newest_update(run.ledger), replay_all(run.ledger, UPDATES))
        assert (weights.same, weights.weight_version, weights.not_done_again) == (True, ITERATIONS, 0)
