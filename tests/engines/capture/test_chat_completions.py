"""Agents that ask by OpenAI's client, unchanged, make trajectories of exactly the tokens that were sampled."""

import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from cairn.engines.capture.session import Session, capture
from cairn.engines.episodes.context import Context
from cairn.engines.trajectories import SampleRequest, Trajectory
from tests.engines.capture.conftest import ADD, CALL, Run, user


def client(session: Session) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)


async def adds(openai: AsyncOpenAI, *, stream: bool = False) -> list[Any]:
    """A question with a tool, and another one after it. Returns the messages."""
    messages: list[Any] = [user("Add 2 and 3.")]
    for later in (None, "Sure?"):
        messages += [user(later)] if later else []
        while True:
            message = await said(openai, messages, stream=stream)
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                given = json.loads(call["function"]["arguments"])
                result = str(given["a"] + given["b"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return messages


async def said(openai: AsyncOpenAI, messages: list[Any], *, stream: bool) -> dict[str, Any]:
    if not stream:
        completion = await openai.chat.completions.create(model="m", messages=messages, tools=[ADD])  # type: ignore[list-item]
        return completion.choices[0].message.model_dump(exclude_none=True)
    content, calls = "", list[dict[str, Any]]()
    async for chunk in await openai.chat.completions.create(
        model="m",
        messages=messages,
        tools=[ADD],
        stream=True,  # type: ignore[list-item]
    ):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        calls += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or ()]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_a_tool_is_one_trajectory_of_what_was_sampled(
    run: Run, tokenizer: Any, stream: bool
) -> None:
    dialogues = list[list[Any]]()

    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample) as session, client(session) as openai:
            dialogues.append(await adds(openai, stream=stream))
        return session.trajectories()

    (sample,) = run(generate)
    assert sample.error is None
    assert [message.get("content") or "" for message in dialogues[0]][2:] == ["5", "It is 5.", "Sure?", "Yes."]
    (trajectory,) = sample.trajectories
    how = {"tools": [ADD], "tokenize": False, "add_generation_prompt": True}
    assert tokenizer.decode(trajectory.prompt_ids) == tokenizer.apply_chat_template([user("Add 2 and 3.")], **how)
    told = [tokenizer.decode(segment.ids) for segment in trajectory.segments]
    assert told == [
        f"{CALL}<|im_end|>",
        "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n",
        "It is 5.<|im_end|>",
        "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
        "Yes.<|im_end|>",
    ]
    assert [bool(segment.loss_mask.any()) for segment in trajectory.segments] == [True, False] * 2 + [True]
    assert sum(len(one.segments) for one in sample.trajectories) == 5
