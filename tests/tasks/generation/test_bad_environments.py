"""One run whose tools and episodes do everything that they should not: each is bounded, named and counted, and nobody
else suffers."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.durable.context import RunContext
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

pytestmark = pytest.mark.slow

CODE = '''
import asyncio
import os
import time

import cairn

pure = cairn.tool(kind="pure", timeout=1, memory=300_000_000, max_output=1000)


@pure
def raises():
    raise LookupError("no such page")


@pure
def hangs():
    time.sleep(3600)


@pure
async def waits():
    await asyncio.Event().wait()


@pure
def gives_bytes():
    return b"page"


@pure
def gives_a_gigabyte():
    return "x" * 2**30


@pure
async def gives_a_megabyte():
    return ["x"] * 2**18


@pure
def gives_another_type():
    return {"page": object()}


@pure
def kills_its_process():
    os._exit(3)


@pure
def answers():
    return "page"


TOOLS = (
    raises, hangs, waits, gives_bytes, gives_a_gigabyte, gives_a_megabyte, gives_another_type, kills_its_process,
    answers,
)


async def generate(ctx, sample):
    """In the first sample of a group what is bad is nobody's concern; in the second one the policy is told."""
    group, careless, ids, segments = sample.group_id, sample.index == 0, list(sample.prompt_ids), []

    async def turn():
        segments.append(await ctx.sample(ids, max_new_tokens=4))
        ids.extend(segments[-1].ids.tolist())

    async def call(tool):
        try:
            said = await ctx.call(tool)
        except cairn.ToolFailed as failed:
            if careless:
                raise
            said = str(failed)
        segments.append(cairn.Segment.given([len(said) % 100] * 64))
        ids.extend(segments[-1].ids.tolist())

    await turn()
    if group < len(TOOLS):
        await call(TOOLS[group])
    if careless and group == 9:
        while True:
            await turn()
            await call(answers)
    if careless and group == 10:
        await asyncio.Event().wait()
    if careless and group == 11:
        raise RuntimeError("the environment is out of order")
    await turn()
    return cairn.Trajectory(segments)
'''

GROUPS = 13
WITHOUT_ENGINE = 6.0
"""Seconds; those in which a call waits for a tool process are not counted."""
NAMED = {
    0: "raises: LookupError: no such page",
    1: "hangs: it took longer than 1 s",
    2: "waits: it took longer than 1 s",
    3: "gives_bytes: it returned a value of type bytes, which is not text",
    4: "gives_a_gigabyte: ",
    5: "gives_a_megabyte: it returned more than the 1,000 characters that it may",
    6: "gives_another_type: it returned a value of type object, which is not text",
    7: "kills_its_process: it ended its process, with exit code 3",
    9: "leaves no room in the context",
    10: f"it took longer than {WITHOUT_ENGINE:g} s outside the engine",
    11: "generate: RuntimeError: the environment is out of order",
}
"""What the failed sample of a group says."""
REASONS = {"raised": 2, "deadline": 4, "type": 4, "memory": 2, "size": 2, "died": 2}
"""Of the calls that failed, one in each sample of their groups."""


@pytest.fixture(scope="module")
def run(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """Its first iteration is over."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "bad.py").write_text(CODE)
    option = {"custom_generate_function_path": f"{folder / 'bad.py'}:generate", "num_rollout": 1}
    size = {"rollout_batch_size": GROUPS, "n_samples_per_prompt": 2}
    config = tiny_config(tiny_assets, rollout={**option, **size, "custom_generate_timeout": WITHOUT_ENGINE})
    with tiny_context(str(folder / "store"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        yield run


def rows(run: RunContext) -> list[dict[str, Any]]:
    """The samples of the groups that were asked for first."""
    found: list[dict[str, Any]] = run.read(run.committed(0, Step.ROLLOUT, "00-000")).to_pylist()
    return found


def test_a_sample_fails_by_name_where_its_code_does_not_mind(
    run: RunContext,
) -> None:
    errors = {row["group_id"]: row["error"] for row in rows(run) if row["error"] is not None}
    assert errors.keys() == NAMED.keys(), errors
    for group, message in NAMED.items():
        assert message in errors[group], errors[group]


def test_failed_calls_are_counted_by_their_reasons(run: RunContext) -> None:
    recorded = run.calls(run.committed(0, Step.ROLLOUT, "00-000"))
    assert recorded is not None
    calls = recorded[0].to_pylist()
    assert Counter(call["reason"] for call in calls if call["reason"] is not None) == REASONS
    assert max(call["seconds"] for call in calls) < 60
    endless = [call for call in calls if (call["group_id"], call["sample_index"]) == (9, 0)]
    assert 40 < len(endless) < 80, "as far as the model's context goes"


def test_the_run_is_trained_on_groups_without_a_failure(run: RunContext) -> None:
    trained = run.committed(0, Step.TRAIN)
    assert trained.metrics["grad_norm"] > 0
