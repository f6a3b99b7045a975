"""Episodes of five turns, each of which changes a world outside, a folder:

world/effects     a line for every effect that is done where its tool is called
world/keys/       a file for every effect that is done once for each key
world/asked       a line for every turn that the policy is asked for
"""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import cairn
from cairn.engines.agents.episodes.context import Context
from cairn.engines.types.trajectories import SampleRequest, Segment, Trajectory

TURNS = 5
TOKENS = 4
MOMENT = 0.004
"""Seconds before and after an effect in which its process can be lost."""


def note(file: Path, **what: Any) -> None:
    """Append a line, whole or not at all."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, (json.dumps(what) + "\n").encode())
    finally:
        os.close(descriptor)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def reply(what: str) -> int:
    """Return the world's answer."""
    return int(hashlib.sha256(what.encode()).hexdigest()[:4], 16)


def effect(world: str, what: str) -> None:
    time.sleep(MOMENT)
    note(Path(world, "effects"), what=what)
    time.sleep(MOMENT)


async def find(intent: cairn.Intent) -> Any:
    """Ask the world."""
    done = {line["what"] for line in lines(Path(intent.arguments["world"], "effects"))}
    return reply(intent.arguments["what"]) if intent.arguments["what"] in done else cairn.NOT_DONE


@cairn.tool(kind="effects", reconcile=find)
def traceable(world: str, what: str) -> int:
    """Done where it is called."""
    effect(world, what)
    return reply(what)


@cairn.tool(kind="effects")
def keyed(world: str, what: str, idempotency_key: str) -> int:
    """Done once for each key, however often it is called."""
    time.sleep(MOMENT)
    done = Path(world, "keys", f"{what}/{idempotency_key}".replace("/", "-"))
    note(Path(world, "calls"), what=what, again=done.exists())
    done.touch()
    time.sleep(MOMENT)
    return reply(what)


@cairn.tool(kind="effects")
def blind(world: str, what: str) -> int:
    """Done where it is called; whether it was cannot be looked up."""
    effect(world, what)
    return reply(what)


TOOLS = {tool.name: tool for tool in (traceable, keyed, blind)}


def as_ids(value: int) -> list[int]:
    return [10 + int(digit) for digit in str(value)]


async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
    """Five turns, after each of which the world is changed and says something."""
    world, tools = sample.metadata["world"], sample.metadata["tools"]
    tool = TOOLS[tools[sample.group_id % len(tools)]]
    ids, segments = list(sample.prompt_ids), list[Segment]()
    ask = ctx._ask

    async def noting(request: Any) -> Any:
        note(Path(world, "asked"), call=[*sample.key, str(turn)], at=time.time())
        return await ask(request)

    ctx._ask = noting
    for turn in range(TURNS):
        segments.append(await ctx.sample(ids, max_new_tokens=TOKENS))
        what = f"{sample.group_id}/{sample.index}/{turn}"
        segments.append(Segment.given(as_ids(await ctx.call(tool, {"world": world, "what": what}))))
        ids += [*segments[-2].ids.tolist(), *segments[-1].ids.tolist()]
    return Trajectory(segments)
