"""The policy calls tools and continues with their results, until it calls none.

| reply of the policy | what follows |
|---|---|
| calls tools of `rollout.tools` | their results; several calls of a reply run concurrently; a failure as its message |
| has an invalid call, or one of an unknown tool | an error message; recorded as the call `unreadable_call` |
| calls none | the end |
| calls some in the last of `rollout.max_turns` replies | the end, truncated |
| reaches the maximum length of a reply, or the context's budget | the end, truncated |

A tool that cannot be called on this machine (`ToolUnavailable`) fails the sample: the policy did not cause it. Results
of tools are not tokens of the policy, and are not trained on.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from cairn.engines.agents.episodes.context import Context
from cairn.engines.agents.generation.call_formats import CallFormat, TagFormat, TemplateFormat
from cairn.engines.agents.replies import ToolCall
from cairn.engines.agents.tools.errors import Reason, ToolFailed
from cairn.engines.agents.tools.tool import Tool
from cairn.engines.types.errors import RequestRefused
from cairn.engines.types.trajectories import SampleRequest, Segment, Trajectory
from cairn.engines.types.types import FinishReason

MOST_CALLS = 16
"""Maximum number of calls that one reply makes."""


async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
    """Sample replies and call their tools until the episode ends."""
    options, form = ctx.options, _format(ctx, sample)
    ids = list(sample.prompt_ids)
    most = options.max_context_len
    segments: list[Segment] = []
    for turn in range(1, options.max_turns + 1):
        try:
            answer = await ctx.sample(ids, max_new_tokens=None if most is None else max(1, most - len(ids)))
        except RequestRefused:
            if not segments:
                raise
            del segments[-1]  # the context has no room for an answer to it
            return Trajectory(segments, truncated=True)
        segments.append(answer)
        ids += answer.ids.tolist()
        if answer.finish_reason == FinishReason.LENGTH:
            return Trajectory(segments, truncated=True)
        calls = form.calls(answer.ids)
        if not calls:
            return Trajectory(segments)
        if turn == options.max_turns:
            break
        result_ids = form.results(answer.ids, await _results(ctx, calls))
        if most is not None and len(ids) + len(result_ids) >= most:
            break
        segments.append(Segment.given(result_ids))
        ids += result_ids
    return Trajectory(segments, truncated=True)


def _format(ctx: Context, sample: SampleRequest) -> CallFormat:
    if ctx.options.tool_call_format == "tags":
        return TagFormat(ctx.tokenizer, ctx.tools)
    return TemplateFormat(ctx.tokenizer, ctx.tools, sample.prompt)


async def _results(ctx: Context, calls: Sequence[ToolCall]) -> list[tuple[str, str]]:
    """Make the calls; return name and result of each."""
    texts: list[str]
    made = calls[:MOST_CALLS]
    if len(made) == 1 or any(call.name in ctx.tools and ctx.tools[call.name].kind == "deterministic" for call in made):
        texts = [await _result(ctx, call) for call in made]  # calls of a tool with a state run in order
    else:
        texts = await asyncio.gather(*(_result(ctx, call) for call in made))
    texts += [f"not called: an answer may ask for {MOST_CALLS} calls at most"] * (len(calls) - len(made))
    return [(call.name, text) for call, text in zip(calls, texts, strict=True)]


async def _result(ctx: Context, call: ToolCall) -> str:
    try:
        why = call.unreadable or _not_there(call.name, ctx.tools)
        if why is not None:
            result = await ctx.call(_UNREADABLE, {"why": why})
        else:
            result = await ctx.call(ctx.tools[call.name], call.arguments)
    except ToolFailed as failed:
        return f"error: {failed}"
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _not_there(name: str, tools: Mapping[str, Tool]) -> str | None:
    return None if name in tools else f"there is no tool {name[:64]!r}: use one of {', '.join(tools)}"


async def _unreadable(why: str) -> Any:
    raise ToolFailed(why, Reason.ARGUMENTS)


_UNREADABLE = Tool(_unreadable, kind="pure", name="unreadable_call")
"""A tool that always fails: mistakes of the policy are thereby recorded and counted as calls."""
