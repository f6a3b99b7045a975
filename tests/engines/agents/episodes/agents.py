"""Functions that samples go through in tests, here and in the process of user code."""

import asyncio
import os
import re
import signal
import time

import cairn
from cairn.engines.agents.episodes.context import Context
from cairn.engines.types.trajectories import SampleRequest, Segment, Trajectory
from tests.engines.agents.tools.bad_tools import busy

WORLD = [9, 10, 11]


async def turns(ctx: Context, sample: SampleRequest) -> Trajectory:
    """As many turns of as many tokens as the sample says; the world speaks in between."""
    ids, segments = list(sample.prompt_ids), list[Segment]()
    for length in sample.metadata["turns"]:
        if segments:
            segments.append(Segment.given(WORLD))
            ids += WORLD
        segments.append(await ctx.sample(ids, max_new_tokens=length))
        ids += segments[-1].ids.tolist()
    return Trajectory(segments)


async def tells_its_process(ctx: Context, sample: SampleRequest) -> Trajectory:
    """By an error, which reaches whoever asked."""
    raise RuntimeError(os.getpid())


async def waits(ctx: Context, sample: SampleRequest) -> Trajectory:
    """The first of a group for what never comes."""
    if sample.index == 0:
        await asyncio.Event().wait()
    return await turns(ctx, sample)


def holds_the_lock() -> None:
    """A regular expression that backtracks without end, in C."""
    re.fullmatch(r"(?:a|aa)+c", "a" * 64)


async def keeps_the_lock(ctx: Context, sample: SampleRequest) -> Trajectory:
    """The first of a group, in a task."""

    async def hold() -> None:
        holds_the_lock()

    if sample.index == 0:
        await asyncio.create_task(hold())
    return await turns(ctx, sample)


@cairn.tool(kind="deterministic")
def keeps_the_lock_in_a_thread() -> None:
    holds_the_lock()


async def asks_a_tool_that_keeps_the_lock(ctx: Context, sample: SampleRequest) -> Trajectory:
    if sample.index == 0:
        await ctx.call(keeps_the_lock_in_a_thread, {})
    return await turns(ctx, sample)


async def keeps_the_lock_in_an_executor(ctx: Context, sample: SampleRequest) -> Trajectory:
    if sample.index == 0:
        await asyncio.to_thread(holds_the_lock)
    return await turns(ctx, sample)


async def sleeps(ctx: Context, sample: SampleRequest) -> Trajectory:
    """The first of a group, in a task, with the loop in its hands."""

    async def sleep() -> None:
        time.sleep(3600)

    if sample.index == 0:
        await asyncio.create_task(sleep())
    return await turns(ctx, sample)


async def keeps_the_lock_at_its_end(ctx: Context, sample: SampleRequest) -> Trajectory:
    """The first of a group, when what it left behind is cancelled; the second when it is given up itself."""

    async def hold(seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            holds_the_lock()

    if sample.index == 0:
        asyncio.create_task(hold(3600))  # noqa: RUF006 left behind
    if sample.index == 1:
        await hold(3600)
    return await turns(ctx, sample)


@cairn.tool(kind="pure")
async def stalls() -> None:
    """Does not give the loop back."""
    time.sleep(3600)


async def asks_a_tool_that_stalls(ctx: Context, sample: SampleRequest) -> Trajectory:
    """The first of a group."""
    if sample.index == 0:
        await ctx.call(stalls)
    return await turns(ctx, sample)


async def notes(ctx: Context, sample: SampleRequest) -> Trajectory:
    """Turns, of which each one that begins, and the process that has it, is a line of the sample's file."""
    segments, ids = list[Segment](), list(sample.prompt_ids)
    for length in sample.metadata["turns"]:
        with open(sample.metadata["file"], "a") as file:
            file.write(f"{sample.group_id} {sample.index} {os.getppid()}\n")
        segments.append(await ctx.sample(ids, max_new_tokens=length))
        ids += segments[-1].ids.tolist()
    return Trajectory(segments)


async def asks_for_much(ctx: Context, sample: SampleRequest) -> Trajectory:
    """The first of a group for many continuations at once."""
    if sample.index == 0:
        ids = list(sample.prompt_ids)
        return Trajectory([(await asyncio.gather(*(ctx.sample(ids, max_new_tokens=20) for _ in range(150))))[0]])
    return await turns(ctx, sample)


async def computes(ctx: Context, sample: SampleRequest) -> Trajectory:
    """A while, in a tool process, before the first turn."""
    await ctx.call(busy, {"seconds": 0.6})
    return await turns(ctx, sample)


async def ends_its_process(ctx: Context, sample: SampleRequest) -> Trajectory:
    """The first of a group, after a turn."""
    result = await turns(ctx, sample)
    if sample.index == 0:
        os._exit(3)
    return result


async def is_killed(ctx: Context, sample: SampleRequest) -> Trajectory:
    """The first of a group, as by the OOM killer, before its first turn; the others wait for it."""
    if sample.index == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.Event().wait()
    return await turns(ctx, sample)
