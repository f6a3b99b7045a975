"""SGLang's `/generate`, as functions written for slime ask it."""

from typing import Any

import httpx

from cairn.engines.agents.capture.server import capture
from cairn.engines.agents.episodes.context import Context
from cairn.engines.types.trajectories import SampleRequest, Trajectory
from tests.engines.agents.capture.conftest import Run

HELLO = "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
BYE = "\n<|im_start|>user\nBye.<|im_end|>\n<|im_start|>assistant\n"
HOW = {"temperature": 0.0, "max_new_tokens": 60, "stop": None, "skip_special_tokens": False, "no_stop_trim": True}


def test_tokens_in_and_tokens_out_make_a_trajectory(run: Run, tokenizer: Any) -> None:
    reported = list[dict[str, Any]]()

    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample) as session, httpx.AsyncClient(timeout=60) as http:
            ids = tokenizer(HELLO)["input_ids"]
            for later in (BYE, ""):
                body = {"input_ids": ids, "sampling_params": HOW, "return_logprob": True}
                reported.append((await http.post(f"{session.url}/generate", json=body)).json())
                ids = [*ids, *reported[-1]["output_ids"], *tokenizer(later)["input_ids"]]
        return session.trajectories()

    (sample,) = run(generate)
    (trajectory,) = sample.trajectories
    first, inputs, second = trajectory.segments
    assert [one["text"] for one in reported] == ["Hello to you.<|im_end|>", "Bye now.<|im_end|>"]
    assert tokenizer.decode(inputs.ids) == BYE
    for one, segment in zip(reported, (first, second), strict=True):
        pairs = [(token, log_prob) for log_prob, token, _ in one["meta_info"]["output_token_logprobs"]]
        assert pairs == list(zip(segment.ids.tolist(), segment.log_probs.tolist(), strict=True))
        assert one["meta_info"]["finish_reason"]["type"] == "stop"
        assert one["meta_info"]["completion_tokens"] == len(segment)


def test_text_goes_on_from_the_tokens_that_were_sampled(run: Run, tokenizer: Any) -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample) as session, httpx.AsyncClient(timeout=60) as http:
            text = HELLO
            for later in (BYE, ""):
                body = {"text": text, "sampling_params": {**HOW, "skip_special_tokens": True}}
                text += (await http.post(f"{session.url}/generate", json=body)).json()["text"] + later
        return session.trajectories()

    (sample,) = run(generate)
    (trajectory,) = sample.trajectories
    assert tokenizer.decode(trajectory.response_ids) == f"Hello to you.<|im_end|>{BYE}Bye now.<|im_end|>"


def test_what_is_not_to_be_had_is_told(run: Run) -> None:
    bad: list[tuple[Any, str]] = [
        ({"sampling_params": {"temperature": 1.0}, "input_ids": [1]}, "temperature=1.0 is not supported"),
        ({"input_ids": [[1], [2]]}, "send one request at a time"),
        ({"text": "a", "input_ids": [1]}, "the request needs either input_ids or text"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": [9]}}, "rollout.rollout_stop_token_ids"),
    ]

    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample) as session, httpx.AsyncClient(timeout=60) as http:
            for body, reported in bad:
                refused = await http.post(f"{session.url}/generate", json=body)
                assert refused.status_code == 400
                assert reported in refused.json()["error"]["message"]
            assert (await http.post(f"{session.url}/generate", content=b"{")).status_code == 400
            await http.post(f"{session.url}/generate", json={"text": HELLO})
        return session.trajectories()

    (sample,) = run(generate)
    assert sample.error is None
