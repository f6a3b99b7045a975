"""Episodes of tests, whose code and tools say in a file what they were asked."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cairn
from cairn.engines.agents.episodes.context import Context
from cairn.engines.types.trajectories import SampleRequest, Segment, Trajectory

TOKENS = 3


def note(folder: str, line: str) -> None:
    with Path(folder, "done").open("a") as file:
        file.write(f"{line}\n")


@cairn.tool(kind="pure")
async def look(folder: str, word: str) -> str:
    note(folder, f"look {word}")
    await asyncio.sleep(0.01 * (len(word) % 3))
    return word.upper()


@cairn.tool(kind="effects")
async def pay(folder: str, amount: int) -> Mapping[str, Any]:
    note(folder, f"pay {amount}")
    return {"paid": amount}


@cairn.tool(kind="effects")
async def pay_once(folder: str, amount: int, idempotency_key: str) -> str:
    note(folder, f"pay {amount} as {idempotency_key}")
    return idempotency_key


async def find_paid(intent: cairn.Intent) -> Any:
    note(intent.arguments["folder"], f"reconcile {intent.key}")
    return cairn.NOT_DONE if intent.arguments["amount"] < 0 else {"found": intent.call}


@cairn.tool(kind="effects", reconcile=find_paid)
async def pay_traceably(folder: str, amount: int) -> Mapping[str, Any]:
    note(folder, f"pay {amount}")
    return {"paid": amount}


@cairn.tool(kind="pure")
async def fail(folder: str) -> str:
    note(folder, "fail")
    raise ValueError("no such page")


class Counter:
    """A world with a state."""

    def __init__(self, folder: str) -> None:
        self.folder, self.total = folder, 0

    @cairn.tool(kind="deterministic")
    async def add(self, amount: int) -> int:
        note(self.folder, f"add {amount}")
        self.total += amount
        return self.total


async def grade(response: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    """In tasks of its own, which a replay does not start."""
    note(metadata["folder"], f"grade {response}")
    await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0))
    return float(len(response))


def as_ids(value: Any) -> list[int]:
    """Tokens that tell a value apart from others."""
    return [10 + ord(letter) % 20 for letter in json.dumps(value, sort_keys=True)[:12]]


async def agent(ctx: Context, sample: SampleRequest) -> Trajectory:
    """As many turns as the sample says, in each of which everything is done that a context offers, much of it side by
    side."""
    folder, turns = sample.metadata["folder"], sample.metadata["turns"]
    counter = Counter(folder)
    ids, segments = list(sample.prompt_ids), list[Segment]()
    for turn in range(turns):
        segments.append(await ctx.sample(ids, max_new_tokens=TOKENS))
        ids += segments[-1].ids.tolist()

        async def aside(word: str) -> list[Any]:
            found = await ctx.call(look, {"folder": folder, "word": word})
            other = await ctx.sample([*sample.prompt_ids, *as_ids(found)], max_new_tokens=TOKENS)
            return [found, other.ids.tolist(), ctx.random().random()]

        seen = [*await asyncio.gather(*(aside(f"{word}{turn}") for word in ("a", "bb", "ccc")))]
        seen.append(await ctx.call(counter.add, {"amount": turn}))
        seen.append(await ctx.call(pay, {"folder": folder, "amount": turn}))
        seen.append(await ctx.judge(grade, "x" * turn, None, {"folder": folder}))
        try:
            await ctx.call(fail, {"folder": folder})
        except cairn.ToolFailed as failed:
            seen.append(f"{failed} {failed.reason}")
        note(folder, f"now {ctx.now()}")
        world = as_ids([turn, seen])
        segments.append(Segment.given(world))
        ids += world
    return Trajectory(segments)


async def pays(ctx: Context, sample: SampleRequest) -> Trajectory:
    """With the tool that the sample names."""
    tool = globals()[sample.metadata["tool"]]
    first = await ctx.sample(sample.prompt_ids, max_new_tokens=TOKENS)
    folder, amount = sample.metadata["folder"], sample.metadata["amount"]
    paid = Segment.given(as_ids(await ctx.call(tool, {"folder": folder, "amount": amount})))
    return Trajectory([first, paid])
