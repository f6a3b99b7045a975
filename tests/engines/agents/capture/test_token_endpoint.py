"""vLLM's endpoint of tokens: what it says is what was sampled, and is in the trajectory token for token."""

from typing import Any

import aiohttp
import numpy as np

import cairn
from tests.engines.agents.capture.conftest import Run, user


async def ask(session: Any, ids: list[int], **how: Any) -> dict[str, Any]:
    body = {"model": "policy", "token_ids": ids, "sampling_params": {"logprobs": 1, "max_tokens": 60, **how}}
    url = f"{session.base_url.removesuffix('/v1')}/inference/v1/generate"
    async with aiohttp.ClientSession() as client, client.post(url, json=body) as response:
        return {"status": response.status, **await response.json()}


def test_turns_are_token_exact(run: Run, tokenizer: Any) -> None:
    seen: list[dict[str, Any]] = []
    text = tokenizer.apply_chat_template([user("Hello.")], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    world = tokenizer("\n<|im_start|>user\nBye.<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)[
        "input_ids"
    ]

    async def generate(ctx: cairn.Context, sample: cairn.SampleRequest) -> list[cairn.Trajectory]:
        async with cairn.capture(ctx, sample, replayable=True) as session:
            end = {"stop_token_ids": [tokenizer.eos_token_id]}
            seen.append(await ask(session, prompt, **end))
            first = seen[-1]["choices"][0]["token_ids"]
            seen.append(await ask(session, [*prompt, *first, *world], **end))
            seen.append(await ask(session, [*prompt, *first, *world], stop_token_ids=[int(first[0])], max_tokens=1))
            seen.append(await ask(session, [], **end))
            seen.append(await ask(session, prompt, temperature=0.5))
            return session.trajectories()[:1]

    (sample,) = run(generate)
    assert sample.error is None
    (trajectory,) = sample.trajectories
    first, second = (said["choices"][0] for said in seen[:2])
    assert tokenizer.decode(first["token_ids"]) == "Hello to you.<|im_end|>"
    assert tokenizer.decode(second["token_ids"]) == "Bye now.<|im_end|>"
    assert trajectory.prompt_ids.tolist() == prompt
    assert trajectory.response_ids.tolist() == [*first["token_ids"], *world, *second["token_ids"]]
    reported = [(one["token"], one["logprob"]) for one in first["logprobs"]["content"]]
    assert [token for token, _ in reported] == [f"token_id:{id}" for id in first["token_ids"]]
    assert np.allclose([log_prob for _, log_prob in reported], trajectory.segments[0].log_probs)
    assert [said["choices"][0]["finish_reason"] for said in seen[:3]] == ["stop", "stop", "length"]
    assert [said["status"] for said in seen] == [200, 200, 200, 400, 400]
    assert "token_ids has to be a list of tokens" in str(seen[3])
    assert "temperature=0.5 is not supported" in str(seen[4])


def test_a_token_that_should_have_ended_the_response_is_named(run: Run, tokenizer: Any) -> None:
    seen: list[dict[str, Any]] = []
    text = tokenizer.apply_chat_template([user("Hello.")], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]

    async def generate(ctx: cairn.Context, sample: cairn.SampleRequest) -> list[cairn.Trajectory]:
        async with cairn.capture(ctx, sample, replayable=True) as session:
            whole = await ask(session, prompt)
            seen.append(await ask(session, prompt, stop_token_ids=[whole["choices"][0]["token_ids"][1]]))
            return session.trajectories()[:1]

    run(generate)
    assert seen[0]["status"] == 400
    assert "add it to rollout.rollout_stop_token_ids" in str(seen[0])
