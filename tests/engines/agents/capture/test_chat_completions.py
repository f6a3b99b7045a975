"""Agents that ask by OpenAI's client, unchanged, make trajectories of exactly the tokens that were sampled."""

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError

from cairn.engines.agents.capture.server import capture
from cairn.engines.agents.capture.session import Session
from cairn.engines.agents.episodes.context import Context
from cairn.engines.types.trajectories import SampleRequest, Trajectory
from tests.engines.agents.capture.conftest import ADD, CALL, Run, as_agents, user


def client(session: Session) -> AsyncOpenAI:
    with as_agents(session):
        return AsyncOpenAI(max_retries=0)


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
                inputs = json.loads(call["function"]["arguments"])
                result = str(inputs["a"] + inputs["b"])
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


def test_where_the_template_leaves_thoughts_out_a_new_trajectory_begins(run: Run, tokenizer: Any) -> None:
    contents = list[Any]()

    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample) as session, client(session) as openai:
            messages: list[Any] = [user("Think.")]
            for later in ("Again.", None):
                completion = await openai.chat.completions.create(model="m", messages=messages)
                message = completion.choices[0].message
                contents.append((message.content, message.model_extra))
                messages += [{"role": "assistant", "content": message.content}, user(later or "")]
        return session.trajectories()

    (sample,) = run(generate)
    assert contents == [("Done.", {"reasoning_content": "Hm."}), ("Done again.", {"reasoning_content": "Hm."})]
    first, second = sample.trajectories
    assert [tokenizer.decode(one.response_ids) for one in (first, second)] == [
        "<think>\nHm.\n</think>\n\nDone.<|im_end|>",
        "<think>\nHm.\n</think>\n\nDone again.<|im_end|>",
    ]
    assert tokenizer.decode(second.prompt_ids) == (
        "<|im_start|>user\nThink.<|im_end|>\n<|im_start|>assistant\nDone.<|im_end|>\n"
        "<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert all(one.loss_mask.all() for one in (first, second))
    assert sample.retold == len(first.response_ids)


def test_a_history_that_the_agent_rewrites_is_a_prompt_and_the_reply_to_it_a_trajectory(
    run: Run, tokenizer: Any
) -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample) as session, client(session) as openai:
            messages: list[Any] = [user("Hello.")]
            await openai.chat.completions.create(model="m", messages=messages)
            rewritten = {"role": "assistant", "content": "Hello to you, in other words."}
            await openai.chat.completions.create(model="m", messages=[*messages, rewritten, user("Bye.")])
        return session.trajectories()

    (sample,) = run(generate)
    first, second = sample.trajectories
    assert tokenizer.decode(first.response_ids) == "Hello to you.<|im_end|>"
    assert "in other words" in tokenizer.decode(second.prompt_ids)
    assert sample.retold == 0  # it is nothing that was sampled


def test_conversations_side_by_side_share_what_they_have_in_common_and_train_on_it_once(
    run: Run, tokenizer: Any
) -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample) as session, client(session) as openai:
            hello: list[Any] = [user("Hello."), {"role": "assistant", "content": " Hello to you.\n"}]
            await openai.chat.completions.create(model="m", messages=hello[:1])
            asked = [[*hello, user("Bye.")], [*hello, user("Hello.")], [user("Think.")]]
            completions = [openai.chat.completions.create(model="m", messages=one) for one in asked]
            await asyncio.gather(*completions)
        return session.trajectories()

    samples = run(generate, samples=3)
    for sample in samples:
        actual = sample.trajectories
        assert sorted(len(one.segments) for one in actual) == [1, 3, 3]
        first, second = (one for one in actual if len(one.segments) == 3)
        assert {tokenizer.decode(one.segments[2].ids) for one in (first, second)} >= {"Bye now.<|im_end|>"}
        assert first.segments[0].ids.tolist() == second.segments[0].ids.tolist()
        assert first.segments[0].loss_mask.all()
        assert not second.segments[0].loss_mask.any()
        assert first.segments[2].loss_mask.all()
        assert second.segments[2].loss_mask.all()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"temperature": 0.7}, "temperature=0.7 is not supported (the run has 0.0), since the run sets how tokens"),
        ({"n": 2}, "n=2 is not supported, since"),
        ({"seed": 3}, "seed=3 is not supported"),
        ({"tool_choice": "required", "tools": [ADD]}, "tool_choice='required' is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format={'type': 'json_object'} is not supported"),
        ({"max_tokens": 0}, "max_tokens=0 has to be a whole number above 0"),
        ({"messages": []}, "messages has to be a list with a message"),
        ({"messages": [{"content": "a"}]}, "message 0 has to be an object with a role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            "a part of message 0 is of type image_url, and only text is read",
        ),
        ({"messages": [user("a" * 9000)]}, "leaves no room in the context of 2048 tokens"),
    ],
)
def test_what_is_not_to_be_had_is_a_bad_request_of_one_sentence(run: Run, asked: dict[str, Any], told: str) -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample) as session, client(session) as openai:
            with pytest.raises(BadRequestError) as refused:
                await openai.chat.completions.create(**{"model": "m", "messages": [user("Hello.")], **asked})
            assert told in refused.value.body["message"], refused.value.body  # type: ignore[index]
            await openai.chat.completions.create(model="m", messages=[user("Hello.")])  # and it goes on
        return session.trajectories()

    (sample,) = run(generate)
    assert sample.error is None


def test_a_session_may_look_over_what_an_agent_asks_of_sampling(run: Run) -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample, ignored={"temperature"}) as session, client(session) as openai:
            await openai.chat.completions.create(model="m", messages=[user("Hello.")], temperature=0.7)
        return session.trajectories()

    (sample,) = run(generate)
    assert sample.error is None


def test_a_reply_may_be_cut_stopped_and_told_with_its_log_probs(run: Run, tokenizer: Any) -> None:
    actual = list[Any]()

    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample) as session, client(session) as openai:
            for asked in ({"max_tokens": 2}, {"stop": [" to"]}, {"logprobs": True}):
                actual.append(
                    (await openai.chat.completions.create(model="m", messages=[user("Hello.")], **asked)).choices[0]  # type: ignore[call-overload]
                )
        return session.trajectories()

    (sample,) = run(generate)
    cut, stopped, whole = actual
    assert (cut.finish_reason, stopped.finish_reason, whole.finish_reason) == ("length", "stop", "stop")
    assert stopped.message.content == "Hello"
    told = [(token.token, token.logprob) for token in whole.logprobs.content]
    of_whole = sample.trajectories[2].segments[0]
    assert of_whole.log_probs is not None
    assert told == [
        (tokenizer.decode([id]), pytest.approx(p)) for id, p in zip(of_whole.ids, of_whole.log_probs, strict=True)
    ]
    assert [len(one.segments) for one in sample.trajectories] == [1, 1, 1]
    assert tokenizer.decode(sample.trajectories[1].response_ids).startswith("Hello to")


def test_without_a_session_in_the_url_the_key_names_it_and_without_either_nothing_is_told(run: Run) -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample) as session:
            root = session.url.rpartition("/")[0]
            async with AsyncOpenAI(base_url=f"{root}/v1", api_key=session.api_key, max_retries=0) as openai:
                assert [model.id async for model in openai.models.list()] == ["policy"]
                await openai.chat.completions.create(model="m", messages=[user("Hello.")])
                with pytest.raises(NotFoundError, match="v1/embeddings is not served"):
                    await openai.embeddings.create(model="m", input="a")
            async with AsyncOpenAI(base_url=f"{root}/v1", api_key="another", max_retries=0) as stranger:
                with pytest.raises(AuthenticationError, match="neither the URL nor the API key names an open session"):
                    await stranger.chat.completions.create(model="m", messages=[user("Hello.")])
        return session.trajectories()

    (sample,) = run(generate)
    assert (sample.error, len(sample.trajectories)) == (None, 1)


def test_a_session_in_which_nothing_was_asked_has_no_trajectories(run: Run) -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
        async with capture(ctx, sample) as session:
            pass
        with pytest.raises(
            ValueError, match=r"the captured session received no request: pass session\.base_url to the agent"
        ):
            session.trajectories()
        return Trajectory([await ctx.sample(sample.prompt_ids)])

    (sample,) = run(generate)
    assert sample.error is None
