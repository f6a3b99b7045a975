"""How samples end whose code catches, cancels and leaves behind what it can: nothing is lost, and nothing repeated."""

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest

import cairn
from cairn.engines.agents.episodes import offline
from cairn.engines.agents.episodes.context import Context, EpisodeOptions
from cairn.engines.agents.episodes.runner import Generate
from cairn.engines.types.trajectories import CallKind, CallRecord, GeneratedSample, SampleRequest, Trajectory
from cairn.engines.types.types import FinishReason
from cairn.tasks.generation.calls import call_records, call_table
from tests.engines.agents.episodes.scripted import PARAMS, asked, ids, played

made: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_made() -> None:
    made.clear()


@cairn.tool(kind="pure")
async def look(word: str, seconds: float = 0.0) -> str:
    await asyncio.sleep(seconds)
    made.append(word)
    return word.upper()


@cairn.tool(kind="effects")
async def pay(amount: int, seconds: float = 0.0) -> int:
    await asyncio.sleep(seconds)
    made.append(f"pay {amount}")
    return amount


@cairn.tool(kind="effects", reconcile=lambda intent: 1 / 0)
async def pay_blindly(amount: int) -> int:
    return amount


@cairn.tool(kind="pure")
async def fail(why: str) -> str:
    raise ValueError(why)


async def finish(ctx: Context, sample: SampleRequest) -> Trajectory:
    return Trajectory([await ctx.sample(sample.prompt_ids)])


def offline_again(generate: Generate, records: list[CallRecord]) -> GeneratedSample:
    (sample,) = asked(records)
    how: dict[str, Any] = {"tokenizer": lambda: None, "tools": dict, "options": EpisodeOptions()}
    return offline.replay(sample, generate, PARAMS, **how)


def test_a_grader_that_fails_is_asked_once_too() -> None:
    def grade(response: str, label: str | None, metadata: dict[str, Any]) -> float:
        made.append("grade")
        if len(made) == 1:
            raise ConnectionError("the service rests")
        return 1.0

    async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
        try:
            await ctx.judge(grade, "word")
        except cairn.JudgeFailed as failed:
            await ctx.call(look, {"word": str(failed)})
        return await finish(ctx, sample)

    (sample,), records = played(generate, asked())
    assert made == ["grade", "grade: ConnectionError: the service rests"]
    for (repeated,) in (played(generate, asked(records))[0], [offline_again(generate, records)]):
        assert ids(repeated) == ids(sample)
    assert len(made) == 2


async def in_gather(ctx: Context, tool: cairn.Tool) -> None:
    await asyncio.gather(ctx.call(tool, {"amount": 3}), ctx.call(look, {"word": "a"}), return_exceptions=True)


async def in_group(ctx: Context, tool: cairn.Tool) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(ctx.call(tool, {"amount": 3}))
        group.create_task(ctx.call(look, {"word": "a"}))


async def in_try(ctx: Context, tool: cairn.Tool) -> None:
    try:
        await ctx.call(tool, {"amount": 3})
    except BaseException:
        made.append("caught")


@pytest.mark.parametrize("way", [in_gather, in_group, in_try])
@pytest.mark.parametrize(("tool", "told"), [(pay, "may have been done"), (pay_blindly, "ZeroDivisionError")])
def test_an_uncertain_effect_fails_its_sample_by_name_whatever_the_code_makes_of_it(
    way: Any, tool: cairn.Tool, told: str
) -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
        await way(ctx, tool)
        return await finish(ctx, sample)

    _, records = played(generate, asked())
    intents = [record for record in records if record.name == tool.name and record.order is None]
    (sample,), _ = played(generate, asked(intents))
    assert sample.error is not None
    assert f'(tool {tool.name}) with {{"amount":3}}' in sample.error
    assert told in sample.error


def test_an_abort_gives_a_sample_back_whose_code_takes_errors_for_values() -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
        await ctx.call(pay, {"amount": 1, "seconds": 0.05})
        result = await asyncio.gather(*(ctx.sample(sample.prompt_ids) for _ in range(2)), return_exceptions=True)
        return Trajectory([next((one for one in result if isinstance(one, cairn.Segment)), cairn.Segment.given([5]))])

    whole, _ = played(generate, asked())
    (sample,), records = played(generate, asked(), abort=lambda record: record.name == "pay" and record.order is None)
    assert (sample.finish_reason, sample.error) == (FinishReason.ABORT, None)
    assert ids(played(generate, asked(records))[0][0]) == ids(whole[0])
    assert made == ["pay 1", "pay 1"]


@pytest.mark.parametrize("lost_at", ["intent", "answer"])
def test_a_log_that_breaks_gives_samples_back_and_no_effect_is_made_that_it_does_not_hold(lost_at: str) -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
        with suppress(Exception):
            await ctx.call(pay, {"amount": 3})
        made.append("went on")
        return await finish(ctx, sample)

    (sample,), _ = played(generate, asked(), lost=lambda record: (record.order is None) == (lost_at == "intent"))
    assert sample.finish_reason == FinishReason.ABORT
    assert made == ([] if lost_at == "intent" else ["pay 3"])


def test_of_effects_side_by_side_an_abort_leaves_none_uncertain() -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
        await asyncio.gather(*(ctx.call(pay, {"amount": amount}) for amount in range(3)))
        return await finish(ctx, sample)

    def first_is_done(record: CallRecord) -> bool:
        return record.name == "pay" and record.order == 0

    (sample,), records = played(generate, asked(), abort=first_is_done)
    assert sample.finish_reason == FinishReason.ABORT
    (sample,), _ = played(generate, asked(records))
    assert sample.error is None
    assert sorted(made) == ["pay 0", "pay 1", "pay 2"]


def test_what_the_code_leaves_running_makes_no_call_after_its_end() -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
        async def go_on() -> None:
            await ctx.call(pay, {"amount": 1, "seconds": 0.05})
            await ctx.call(pay, {"amount": 2})

        left.append(asyncio.create_task(go_on()))
        if sample.index == 0:
            await ctx.call(look, {"word": "last", "seconds": 0.3})
        return await finish(ctx, sample)

    left: list[asyncio.Task[None]] = []
    samples, records = played(generate, asked(count=2))
    assert [sample.error for sample in samples] == [None, None]
    assert sorted(made) == ["last", "pay 1", "pay 1", "pay 2"]
    of_second = [record for record in records if record.index == 1]
    assert [(record.call, record.order) for record in of_second] == [("t0.c0", None), ("0", 0), ("t0.c0", 1)]
    repeated, _ = played(generate, asked(records, 2))
    assert [ids(sample) for sample in repeated] == [ids(sample) for sample in samples]


def test_what_runs_beside_a_call_has_begun_before_it_is_answered_in_a_replay_too() -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
        async def begin() -> None:
            begun.append("beside")
            await ctx.call(look, {"word": "b", "seconds": 0.2})

        begun: list[str] = []
        task = asyncio.create_task(begin())
        await ctx.call(look, {"word": "a", "seconds": 0.05})
        await ctx.call(look, {"word": "".join(begun)})
        assert await ctx.judge(lambda *words: len(begun), "c") == 1.0
        await task
        return await finish(ctx, sample)

    (sample,), records = played(generate, asked())
    (repeated,), new = played(generate, asked(records))
    assert (ids(repeated), new) == (ids(sample), [])


async def in_time(ctx: Context) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await ctx.call(look, {"word": "late", "seconds": 10.0})


async def first_of_two(ctx: Context) -> None:
    tasks = [asyncio.create_task(ctx.call(look, {"word": "ab"[n], "seconds": 10.0 * n})) for n in range(2)]
    _, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()


async def one_fails(ctx: Context) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.call(pay, {"amount": 1, "seconds": 10.0}))
            group.create_task(ctx.call(fail, {"why": "of the other"}))
    except* cairn.ToolFailed:
        pass


@pytest.mark.parametrize("way", [in_time, first_of_two, one_fails])
def test_calls_that_the_code_broke_off_are_broken_off_in_a_replay(way: Any) -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
        await way(ctx)
        return await finish(ctx, sample)

    (sample,), records = played(generate, asked())
    before = len(made)
    assert ids(offline_again(generate, records)) == ids(sample)
    assert len(made) == before


def test_a_call_that_is_not_in_the_record_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "STUCK", 0.1)

    async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
        await asyncio.gather(ctx.call(look, {"word": "a"}), return_exceptions=True)
        return await finish(ctx, sample)

    _, records = played(generate, asked())
    for left in ([], [record for record in records if record.kind is CallKind.SAMPLE]):
        with pytest.raises(offline.NotRecorded, match=r"call t0.c0 \(tool look\) with .* is not in the record"):
            offline_again(generate, left)


def test_a_function_that_is_no_tool_is_told_how_to_become_one() -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
        function: Any = played
        await ctx.call(function, {})
        return await finish(ctx, sample)

    (sample,), _ = played(generate, asked())
    assert sample.error is not None
    assert "played is not one: decorate it with @cairn.tool(kind=…)" in sample.error


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("error", [ValueError("\ud800"), Wordless(), ValueError("a" * 10**6)])
def test_whatever_an_error_says_its_sample_ends_and_can_be_stored(error: Exception) -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
        raise error

    began = time.monotonic()
    (sample,), _ = played(generate, asked())
    assert time.monotonic() - began < 4
    assert sample.error is not None
    assert len(sample.error.encode()) < 5000
    assert sample.error.startswith(f"generate: {type(error).__name__}: ")


def test_half_surrogates_in_calls_can_be_stored_and_are_given_again() -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
        assert await ctx.call(look, {"word": "\ud800"}) == "\\ud800"
        for tool, words in ((look, {"\udfff": 1}), (fail, {"why": "\ud800"})):
            with pytest.raises(cairn.ToolFailed):
                await ctx.call(tool, words)
        assert await ctx.judge(lambda *words: 1.0, "\ud800", metadata={"a": "\ud800"}) == 1.0
        return await finish(ctx, sample)

    (sample,), records = played(generate, asked())
    assert call_records(call_table(records))[:4] == records[:4]
    (repeated,), _ = played(generate, asked(records))
    assert ids(repeated) == ids(sample)
