"""Generate functions written for slime run as they are, in the process of user code, beside a real engine."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types.types import SamplingParams

CODE = '''
from cairn.slime import GenerateState, Sample, post

QUESTION = "<|im_start|>user\\nHello.<|im_end|>\\n<|im_start|>assistant\\n"
NEXT = "\\n<|im_start|>user\\nBye.<|im_end|>\\n<|im_start|>assistant\\n"


async def by_tokens(args, sample: Sample, sampling_params) -> Sample:
    """As slime's retool: its own prompt, tokens in, and `append_response_tokens`."""
    assert not args.partial_rollout
    assert args.rollout_max_context_len is None
    assert getattr(args, "no_such_flag", 7) == 7
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = state.tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    for world in (NEXT, None):
        payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        sampled = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[token for _, token, *_ in sampled],
            log_probs=[log_prob for log_prob, *_ in sampled],
            trainable=True,
            meta_info=output["meta_info"],
        )
        if world:
            ids = state.tokenizer(world, add_special_tokens=False)["input_ids"]
            sample.append_response_tokens(args, tokens=ids, trainable=False)
    return sample


async def by_text(args, sample, sampling_params):
    """As slime's search-r1: text in, with a string that ends the turn."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    response, ids, mask = "", [], []
    prompt = state.tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    for world in (" and", None):
        params = {**sampling_params, "stop": [" to"]} if world else sampling_params
        payload = {"text": QUESTION + response, "sampling_params": params, "return_logprob": True}
        output = await post(url, payload)
        sampled = [token for _, token, *_ in output["meta_info"]["output_token_logprobs"]]
        response, ids, mask = response + output["text"], ids + sampled, mask + [1] * len(sampled)
        if world:
            given = state.tokenizer(world, add_special_tokens=False)["input_ids"]
            response, ids, mask = response + world, ids + given, mask + [0] * len(given)
    sample.tokens, sample.response_length, sample.response = prompt + ids, len(ids), response
    sample.loss_mask, sample.status = mask, Sample.Status.COMPLETED
    return [sample]


async def forges(args, sample, sampling_params):
    sample = await by_tokens(args, sample, sampling_params)
    sample.tokens[-2] += 1
    return sample


async def asks_otherwise(args, sample, sampling_params):
    sampling_params["temperature"] = 0.5
    return await by_tokens(args, sample, sampling_params)


async def gives_up(args, sample, sampling_params):
    sample = await by_tokens(args, sample, sampling_params)
    sample.status = Sample.Status.ABORTED
    return sample


async def fans_out(args, sample, sampling_params):
    """As slime's multi-agent example: several samples, of which some have their rewards."""
    found = []
    for reward in (1, None, -0.5):
        own = Sample(metadata=sample.metadata, reward=reward)
        found.append(await by_tokens(args, own, sampling_params))
    return found


async def scores(args, sample, sampling_params):
    sample.reward = {"score": 1.0}
    return await by_tokens(args, sample, sampling_params)


async def generate(args, sample, sampling_params):
    """The one that the sample names: a process takes long to start."""
    return await globals()[sample.metadata["as"]](args, sample, sampling_params)
'''


@pytest.fixture(scope="module")
def generated(engine: TransformersEngine, talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs one of the functions for a sample."""
    file = tmp_path_factory.mktemp("code") / "written_for_slime.py"
    file.write_text(CODE)
    samples = SampleEngine(engine.open, engine.abort)
    params = SamplingParams(max_new_tokens=60, temperature=0.0)
    search = (str(Path(__file__).parents[4]), *sys.path)
    function = GenerateFunction(f"{file}:generate", search, str(talker), timeout=60.0)

    def generated(name: str) -> GeneratedSample:
        requested = SampleRequest(0, 0, [20, 21, 22], 7, metadata={"as": name})
        with closing(samples.generate([requested], params, function)) as stream:  # type: ignore[type-var]
            (result,) = [sample for part in stream if isinstance(part, list) for sample in part]
        return result

    return generated


@pytest.mark.slow
def test_what_they_ask_is_what_they_return(generated: Any, tokenizer: Any) -> None:
    sample = generated("by_tokens")
    assert sample.error is None
    (trajectory,) = sample.trajectories
    assert [tokenizer.decode(one.ids) for one in trajectory.segments] == [
        "Hello to you.<|im_end|>",
        "\n<|im_start|>user\nBye.<|im_end|>\n<|im_start|>assistant\n",
        "Bye now.<|im_end|>",
    ]
    assert tokenizer.decode(trajectory.prompt_ids).startswith("<|im_start|>user\nHello.")
    assert [one.call is None for one in trajectory.segments] == [False, True, False]
    assert all(one.log_probs is not None for one in trajectory.segments[::2])


def test_samples_keep_the_rewards_that_they_are_returned_with(generated: Any) -> None:
    sample = generated("fans_out")
    assert sample.error is None
    assert [trajectory.reward for trajectory in sample.trajectories] == [1.0, None, -0.5]
    assert generated("by_text").rewards is None


def test_text_and_ends_of_turns_are_of_exact_tokens(generated: Any, tokenizer: Any) -> None:
    sample = generated("by_text")
    assert sample.error is None
    first, inputs, second = sample.trajectories[0].segments
    assert tokenizer.decode(first.ids).startswith("Hello to")
    assert tokenizer.decode(inputs.ids) == " and"
    assert len(second) > 0


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("forges", "trains on tokens that the policy did not sample in this context"),
        ("asks_otherwise", "temperature=0.5 is not supported (the run has 0.0)"),
        ("gives_up", "generate returned a sample whose status is aborted"),
        ("scores", "generate returned a sample whose reward is a mapping: set the number alone, or None"),
    ],
)
def test_what_was_not_sampled_so_fails_its_sample(generated: Any, name: str, told: str) -> None:
    assert told in generated(name).error
