"""Generate functions written for slime run as they are, in the process of user code, beside a real engine."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cairn.engines.agents.episodes.context import EpisodeOptions
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


async def asks_for_a_model(args, sample, sampling_params):
    from slime.rollout.sglang_rollout import get_model_url

    await post(get_model_url(args, "reward"), {})


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


async def text_again(args, sample, sampling_params):
    """As the generate function of slime's guides: text in, text out, tokens of the text."""
    from slime.utils.http_utils import post as post_of_slime
    from slime.utils.processing_utils import load_tokenizer
    from slime.utils.types import Sample as SlimeSample

    assert isinstance(sample, SlimeSample) and post_of_slime is post
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"text": QUESTION, "sampling_params": sampling_params})
    prompt = tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    response = tokenizer(output["text"], add_special_tokens=False)["input_ids"]
    sample.tokens, sample.response_length = prompt + response, len(response)
    sample.response, sample.truncated = output["text"], output["meta_info"]["finish_reason"]["type"] == "length"
    return sample


async def several_turns(args, samples, evaluation=False):
    """As the one of the skills: a list of samples, no tokens, a reward, its own flags."""
    assert (evaluation, args.max_turns, args.context_parallel_size) == (False, 2, 1)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/v1/chat/completions"
    for sample in samples:
        conversation = sample.prompt
        for turn in range(args.max_turns):
            output = await post(url, {"messages": conversation})
            response = output["choices"][0]["message"]["content"]
            if turn == 0:
                conversation.append({"role": "assistant", "content": response})
                conversation.append({"role": "user", "content": "Bye."})
        sample.response, sample.reward, sample.tool_calls = response, 0.5, turn
        sample.metadata["turns"] = args.max_turns


async def rewrites(args, sample, sampling_params):
    """Its text is not what the policy said."""
    sample = await text_again(args, sample, sampling_params)
    ids = GenerateState(args).tokenizer("Bye now.", add_special_tokens=False)["input_ids"]
    sample.tokens, sample.response_length = sample.tokens[:-sample.response_length] + ids, len(ids)
    sample.response = "Bye now."
    return sample


async def in_place(args, sample, sampling_params):
    """As slime's retool: the mask is a list that the sample extends."""
    sample.loss_mask = masks = []
    sample = await by_tokens(args, sample, sampling_params)
    assert sample.loss_mask is masks
    sample.loss_mask = masks
    return sample


async def edits(args, sample, sampling_params):
    sample = await by_tokens(args, sample, sampling_params)
    for name, code in sample.metadata["edits"].items():
        setattr(sample, name, eval(code, {"sample": sample, "tokens": sample.tokens}))
    return sample


async def generate(args, sample, sampling_params):
    """The one that the sample names: a process takes long to start."""
    function = globals()[sample.metadata["as"]]
    if function is several_turns:
        await several_turns(args, [sample])
        return None
    return await function(args, sample, sampling_params)
'''


@pytest.fixture(scope="module")
def generated(engine: TransformersEngine, talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs one of the functions for a sample."""
    file = tmp_path_factory.mktemp("code") / "written_for_slime.py"
    file.write_text(CODE)
    samples = SampleEngine(engine.open, engine.abort)
    params = SamplingParams(max_new_tokens=60, temperature=0.0)
    search = (str(Path(__file__).parents[4]), *sys.path)
    args = {"hf_checkpoint": str(talker), "max_turns": 2, "context_parallel_size": 1, "reward_key": "score"}
    options = EpisodeOptions(args=args)
    function = GenerateFunction(f"{file}:generate", search, str(talker), timeout=60.0, options=options)

    def generated(name: str, **edits: str) -> GeneratedSample:
        prompt = '[{"role": "user", "content": "Hello."}]'
        requested = SampleRequest(0, 0, [20, 21, 22], 7, prompt=prompt, metadata={"as": name, "edits": edits})
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


def test_text_that_is_tokenized_again_takes_the_recorded_tokens(generated: Any, tokenizer: Any) -> None:
    sample = generated("text_again")
    assert sample.error is None
    (segment,) = sample.trajectories[0].segments
    assert tokenizer.decode(segment.ids) == "Hello to you.<|im_end|>"
    assert (segment.loss_mask.all(), sample.retold) == (True, 0)
    assert tokenizer.decode(sample.trajectories[0].prompt_ids).startswith("<|im_start|>user\nHello.")
    assert sample.infos == ({"truncated": False},)


def test_a_sample_without_tokens_is_what_the_record_says(generated: Any, tokenizer: Any) -> None:
    sample = generated("several_turns")
    assert sample.error is None
    (trajectory,) = sample.trajectories
    assert [one.call is None for one in trajectory.segments] == [False, True, False]
    assert trajectory.loss_mask.sum() == sum(len(one) for one in trajectory.segments[::2])
    assert tokenizer.decode(trajectory.segments[2].ids) == "Bye now.<|im_end|>"
    assert trajectory.reward == 0.5
    metadata = {"as": "several_turns", "edits": {}, "turns": 2}
    assert trajectory.info is not None
    assert len(trajectory.info.pop("prompt")) == 3, "the function has extended the messages"
    assert trajectory.info == {"response": "Bye now.", "tool_calls": 1, "metadata": metadata}


def test_other_text_leaves_the_sample_alive_and_is_counted(generated: Any, tokenizer: Any) -> None:
    sample = generated("rewrites")
    assert sample.error is None
    (segment,) = sample.trajectories[0].segments
    assert tokenizer.decode(segment.ids) == "Hello to you.<|im_end|>"
    assert sample.retold == len(segment)
    assert sample.infos[0]["response"] == "Bye now."


def test_tokens_that_were_not_sampled_are_not_trained_on(generated: Any) -> None:
    sample = generated("forges")
    assert sample.error is None
    first, given = sample.trajectories[0].segments
    assert (first.call is None, given.call is None) == (False, True)
    assert (first.loss_mask.all(), given.loss_mask.any()) == (True, False)
    assert 0 < sample.retold < len(given)


def test_a_mask_is_extended_in_place(generated: Any) -> None:
    sample = generated("in_place")
    assert sample.error is None
    assert sample.trajectories[0].loss_mask.sum() == sum(len(one) for one in sample.trajectories[0].segments[::2])


def test_a_mapping_is_a_reward_by_its_key(generated: Any) -> None:
    assert generated("scores").rewards == (1.0,)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("asks_otherwise", "temperature=0.5 is not supported (the run has 0.0)"),
        ("gives_up", "generate returned a sample whose status is aborted"),
        ("asks_for_a_model", "no model 'reward' is served: only the policy is"),
    ],
)
def test_what_was_not_sampled_so_fails_its_sample(generated: Any, name: str, told: str) -> None:
    assert told in generated(name).error


@pytest.mark.parametrize(
    ("field", "code", "told"),
    [
        ("loss_mask", "[0.5] * sample.response_length", "loss_mask has other values than whole numbers up to 1"),
        ("loss_mask", "[2] * sample.response_length", "loss_mask has other values"),
        ("loss_mask", "[[1]] * sample.response_length", "loss_mask has other values"),
        ("loss_mask", "[float('nan')] * sample.response_length", "loss_mask has other values"),
        ("loss_mask", "3", "loss_mask has other values"),
        ("loss_mask", "[1]", "1 in loss_mask"),
        ("tokens", "tokens[:-1] + [-5]", "tokens has other values"),
        ("tokens", "[one + 0.5 for one in tokens]", "tokens has other values"),
        ("tokens", "tokens[:-1] + [2 ** 40]", "tokens has other values"),
        ("tokens", "[tokens, tokens[:-1]]", "tokens has other values"),
        ("response_length", "None", "response_length has other values"),
        ("response_length", "-3", "response_length has other values"),
        ("reward", "[1.0]", "whose reward is no number: it is list"),
        ("reward", "10 ** 400", "whose reward is no number: it is int"),
        ("reward", "float('nan')", "the reward nan, which is not finite"),
    ],
)
def test_values_of_another_kind_fail_their_sample_with_a_sentence(
    generated: Any, field: str, code: str, told: str
) -> None:
    assert told in generated("edits", **{field: code}).error


def test_attributes_that_no_grader_can_get_are_left_out(generated: Any) -> None:
    deep = "__import__('functools').reduce(lambda inner, _: [inner], range(300), 1)"
    sample = generated("edits", own=deep, other="object()", kept="3")
    assert sample.error is None
    assert sample.infos[0]["kept"] == 3
    assert not {"own", "other"} & sample.infos[0].keys()
