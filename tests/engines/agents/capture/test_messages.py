"""Agents that ask by Anthropic's client, unchanged."""

from typing import Any

import pytest
from anthropic import AsyncAnthropic, BadRequestError

from cairn.engines.agents.capture.server import capture
from cairn.engines.agents.capture.session import Session
from cairn.engines.agents.episodes.context import Context
from cairn.engines.types.trajectories import SampleRequest, Trajectory
from tests.engines.agents.capture.conftest import ADD, CALL, Run, as_agents, user

TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": ADD["function"]["parameters"]}


def client(session: Session) -> AsyncAnthropic:
    with as_agents(session):
        return AsyncAnthropic(max_retries=0)


async def said(anthropic: AsyncAnthropic, messages: list[Any], *, stream: bool) -> Any:
    requested: dict[str, Any] = {"model": "m", "max_tokens": 60, "messages": messages, "tools": [TOOL]}
    if not stream:
        return await anthropic.messages.create(**requested)
    async with anthropic.messages.stream(**requested) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_a_tool_is_one_trajectory_of_what_was_sampled(
    run: Run, tokenizer: Any, stream: bool
) -> None:
    reasons = list[Any]()

    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample) as session, client(session) as anthropic:
            messages: list[Any] = [user("Add 2 and 3.")]
            while True:
                message = await said(anthropic, messages, stream=stream)
                reasons.append(message.stop_reason)
                messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
                calls = [block for block in message.content if block.type == "tool_use"]
                if not calls:
                    break
                results = [
                    {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] + call.input["b"])}
                    for call in calls
                ]
                messages.append({"role": "user", "content": results})
            messages.append({"role": "user", "content": [{"type": "text", "text": "Sure?"}]})
            assert (await said(anthropic, messages, stream=stream)).content[0].text == "Yes."
        return session.trajectories()

    (sample,) = run(generate)
    assert (sample.error, reasons) == (None, ["tool_use", "end_turn"])
    (trajectory,) = sample.trajectories
    reported = [tokenizer.decode(segment.ids) for segment in trajectory.segments]
    assert [reported[0], reported[2], reported[4]] == [f"{CALL}<|im_end|>", "It is 5.<|im_end|>", "Yes.<|im_end|>"]
    assert reported[1] == "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"


def test_system_thoughts_limits_and_counts(run: Run, tokenizer: Any) -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample) as session, client(session) as anthropic:
            message = await anthropic.messages.create(model="m", max_tokens=60, messages=[user("Think.")])
            assert [block.type for block in message.content] == ["thinking", "text"]
            assert (message.content[0].thinking, message.content[1].text) == ("Hm.", "Done.")  # type: ignore[union-attr]
            cut = await anthropic.messages.create(model="m", max_tokens=2, system="Be.", messages=[user("Hello.")])
            assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
            stopped = await anthropic.messages.create(
                model="m", max_tokens=9, stop_sequences=[" to"], messages=[user("Hello.")]
            )
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " to")
            counted = await anthropic.messages.count_tokens(model="m", messages=[user("Hello.")])
            assert counted.input_tokens == stopped.usage.input_tokens + (stopped.usage.cache_read_input_tokens or 0)
            with pytest.raises(BadRequestError, match=r"top_p=0\.5 is not supported \(the run has 1\.0\)"):
                await anthropic.messages.create(
                    model="m", max_tokens=9, messages=[user("Hello.")], extra_body={"top_p": 0.5}
                )
        return session.trajectories()

    (sample,) = run(generate)
    assert sample.error is None
    assert tokenizer.decode(sample.trajectories[1].prompt_ids).startswith("<|im_start|>system\nBe.<|im_end|>\n")
