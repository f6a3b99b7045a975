import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, MambaConfig

from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.errors import BadModel, EngineError, RequestRefused
from cairn.engines.types.types import FinishReason, GenerateRequest
from tests.engines.rollout.models import (
    CONTEXT_LENGTH,
    END_TOKEN,
    VOCAB_SIZE,
    Samples,
    collect,
    configs,
    full_log_probs,
    random_requests,
    request,
    rollout_config,
    same,
    save_model,
)
from tests.requests import by_id


@pytest.mark.parametrize("architecture", configs())
def test_log_probs_are_those_of_a_full_forward_pass_of_the_library(
    architecture: str, model_folders: dict[str, str]
) -> None:
    engine = TransformersEngine(model_folders[architecture], rollout_config())
    model = AutoModelForCausalLM.from_pretrained(model_folders[architecture]).eval()
    requests = random_requests(seed=5, count=12)
    samples = collect(engine, requests)
    worst = 0.0
    for one in requests:
        sample = samples[one.request_id]
        expected = full_log_probs(model, one, sample)
        assert sample.response_ids.dtype == np.int32
        assert sample.log_probs.dtype == np.float32
        worst = max(worst, float(np.abs(sample.log_probs - expected).max()))
    assert worst <= 1e-5


@pytest.mark.parametrize("architecture", configs())
def test_greedy_tokens_are_those_of_generate(architecture: str, model_folders: dict[str, str]) -> None:
    engine = TransformersEngine(model_folders[architecture], rollout_config())
    model = AutoModelForCausalLM.from_pretrained(model_folders[architecture]).eval()
    prompts = [np.random.default_rng(i).integers(VOCAB_SIZE, size=3 + 11 * i).tolist() for i in range(5)]
    greedy = {"temperature": 0, "max_new_tokens": 30}
    samples = collect(engine, [one for i, prompt in enumerate(prompts) for one in request(i, prompt, **greedy)])
    config = GenerationConfig(max_new_tokens=30, do_sample=False, eos_token_id=END_TOKEN, pad_token_id=0)
    for i, prompt in enumerate(prompts):
        expected = model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :]
        assert samples[i, 0].response_ids.tolist() == expected.tolist()


def test_tokens_are_drawn_from_the_models_distribution(qwen3: TransformersEngine, qwen3_folder: Path) -> None:
    prompt = [5, 9, 200]
    samples = collect(qwen3, request(0, prompt, samples=4000, max_new_tokens=1))
    model = AutoModelForCausalLM.from_pretrained(qwen3_folder).eval()
    with torch.no_grad():
        probs = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double(), -1).numpy()
    counts = np.bincount([int(c.response_ids[0]) for c in samples.values()], minlength=VOCAB_SIZE)
    deviation = np.abs(counts - 4000 * probs) / np.sqrt(4000 * probs * (1 - probs))
    assert deviation.max() < 5


def test_a_response_ends_with_its_end_token_or_at_its_longest_length(qwen3: TransformersEngine) -> None:
    stops = tuple(range(40, 60))
    samples = collect(qwen3, request(0, [1, 2, 3], samples=60, max_new_tokens=20, stop_token_ids=stops))
    reasons = set()
    for sample in samples.values():
        *before, last = sample.response_ids.tolist()
        ends = {END_TOKEN, *stops}
        assert not ends & set(before)
        assert sample.finish_reason is (FinishReason.STOP if last in ends else FinishReason.LENGTH)
        assert sample.finish_reason is FinishReason.STOP or len(before) == 19
        reasons.add(sample.finish_reason)
    assert len(reasons) == 2


def test_a_response_ends_with_the_context(qwen3: TransformersEngine) -> None:
    prompt = [1] * (CONTEXT_LENGTH - 3)
    sample = collect(qwen3, request(0, prompt, max_new_tokens=50))[0, 0]
    assert len(sample.response_ids) == 3
    assert sample.finish_reason is FinishReason.LENGTH


def test_earlier_requests_finish_first_when_there_is_no_room_for_all(model_folders: dict[str, str]) -> None:
    engine = TransformersEngine(model_folders["qwen3"], rollout_config(max_running_requests=8))
    requests = [one for i in range(8) for one in request(i, [1, 2, 3 + i], samples=4, max_new_tokens=10)]
    order = [c.request_id[0] for completions in engine.generate(requests) for c in completions]
    assert len(order) == 32
    assert max(order[:8]) <= 3
    assert min(order[-8:]) >= 4


def test_groups_larger_than_the_batch_are_served(model_folders: dict[str, str]) -> None:
    engine = TransformersEngine(model_folders["qwen3"], rollout_config(max_running_requests=4))
    samples = collect(engine, [*request(0, [1, 2], samples=11), *request(2, [4], samples=1)])
    assert samples.keys() == {(0, i) for i in range(11)} | {(2, 0)}


def test_no_requests_give_no_completions(qwen3: TransformersEngine) -> None:
    assert list(qwen3.generate([])) == []


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "request 3/0 .* prompt is empty"),
        ([1] * CONTEXT_LENGTH, {}, "request 3/0 .* prompt of 128 tokens leaves no room in the context of 128"),
        ([1, VOCAB_SIZE], {}, "request 3/0 .* token 320, outside the model's vocabulary"),
        ([1], {"max_new_tokens": 0}, "request 3/0 .* max_new_tokens is 0"),
        ([1], {"temperature": -1.0}, "request 3/0 .* temperature is -1"),
        ([1], {"top_p": 0.0}, "request 3/0 .* top_p is 0"),
    ],
)
def test_a_request_that_cannot_be_served_is_named_before_anything_is_generated(
    prompt: list[int], params: dict, message: str, qwen3: TransformersEngine
) -> None:
    with pytest.raises(ValueError, match=message):
        qwen3.generate([*request(1, [1, 2]), *request(3, prompt, **params)])
    assert qwen3.health()["tokens_generated"] == 0


def aborted_after(engine: TransformersEngine, requests: list[GenerateRequest], finished: int) -> Samples:
    """All samples of a generation that another thread aborts once so many have finished."""
    samples: Samples = {}
    for completions in engine.generate(requests):
        samples |= by_id([completions])
        if len(samples) >= finished:
            caller = threading.Thread(target=engine.abort)
            caller.start()
            caller.join(timeout=10)
    return samples


def test_abort_from_another_thread_gives_every_sample_as_far_as_it_came(model_folders: dict[str, str]) -> None:
    engine = TransformersEngine(model_folders["qwen3"], rollout_config(max_running_requests=16))
    groups = [request(i, [1, i], samples=4, max_new_tokens=2 if i < 2 else 120) for i in range(10)]
    requests = [one for group in groups for one in group]
    whole = collect(engine, requests)
    samples = aborted_after(engine, requests, finished=8)
    assert samples.keys() == whole.keys()
    unfinished = {key for key, sample in samples.items() if sample.finish_reason == FinishReason.ABORT}
    assert 0 < len(unfinished) <= 32
    assert {len(samples[key].response_ids) for key in unfinished} > {0}  # some began, some were still waiting
    assert all(same(samples[key], whole[key]) for key in whole.keys() - unfinished)
    for key in unfinished:
        length = len(samples[key].response_ids)
        assert length < len(whole[key].response_ids)
        assert (samples[key].response_ids == whole[key].response_ids[:length]).all()
        assert (samples[key].log_probs == whole[key].log_probs[:length]).all()
    assert engine.health()["running_requests"] == 0
    assert collect(engine, requests).keys() == whole.keys()


def test_a_continued_sample_is_the_one_that_was_never_interrupted(qwen3: TransformersEngine) -> None:
    requests = [one for i in range(3) for one in request(i, [1, i], samples=4, max_new_tokens=60, temperature=0.8)]
    whole = collect(qwen3, requests)
    draw = np.random.default_rng(0)
    lengths = {key: int(draw.integers(len(sample.response_ids))) for key, sample in whole.items()}
    lengths[0, 0] = 0
    halves = [
        replace(one, input_ids=[*one.input_ids, *whole[one.request_id].response_ids[:length]], position=length)
        for one in requests
        for length in [lengths[one.request_id]]
    ]
    for key, sample in collect(qwen3, halves).items():
        retained = lengths[key]
        assert (sample.response_ids == whole[key].response_ids[retained:]).all()
        assert np.abs(sample.log_probs - whole[key].log_probs[retained:]).max() < 1e-4
        assert sample.finish_reason == whole[key].finish_reason


@pytest.mark.parametrize(
    ("input_ids", "position", "message"),
    [
        ([1, 2], -1, "its position is -1"),
        ([1, 2], 2, "its position is 2; it must be 0 or more and less than its 2 tokens"),
        ([1] * 9, 8, "a response of 8 tokens cannot be continued: its limit is 8"),
        ([1, VOCAB_SIZE], 1, "outside the model's vocabulary"),
    ],
)
def test_a_response_that_cannot_be_continued_is_refused(
    input_ids: list[int], position: int, message: str, qwen3: TransformersEngine
) -> None:
    (one,) = request(0, input_ids)
    with pytest.raises(RequestRefused, match=message):
        qwen3.generate([replace(one, position=position)])


def test_weights_stay_while_samples_are_generated_and_until_the_stream_is_closed(qwen3: TransformersEngine) -> None:
    first = qwen3.generate([*request(0, [1, 2], samples=2), *request(1, [1], max_new_tokens=100)])
    next(first)
    with pytest.raises(EngineError, match="engine is generating"):
        qwen3.begin_weight_update(1)
    first.close()
    qwen3.begin_weight_update(1)


def test_health_counts_what_was_generated(qwen3: TransformersEngine) -> None:
    samples = collect(qwen3, random_requests(seed=2, count=3))
    health = qwen3.health()
    assert health["tokens_generated"] == sum(len(sample.response_ids) for sample in samples.values())
    assert health["seconds"] > 0
    assert (health["model_type"], health["dtype"], health["device"]) == ("qwen3", "float32", "cpu")
    assert (health["num_threads"], health["weight_version"], health["running_requests"]) == (1, 0, 0)


def test_bfloat16_log_probs_are_near_those_of_float32(model_folders: dict[str, str]) -> None:
    engine = TransformersEngine(model_folders["qwen3"], rollout_config(dtype="bfloat16"))
    model = AutoModelForCausalLM.from_pretrained(model_folders["qwen3"]).eval()
    requests = request(0, [4, 5, 6], samples=3)
    (one, *_) = requests
    for sample in collect(engine, requests).values():
        expected = full_log_probs(model, one, sample)
        assert np.abs(sample.log_probs - expected).max() < 0.2


def test_a_model_without_key_value_layers_is_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, max_position_embeddings=64)
    with pytest.raises(BadModel, match="mamba"):
        TransformersEngine(save_model(config, tmp_path), rollout_config())


def test_a_layer_with_several_states_is_refused(tmp_path: Path) -> None:
    config = configs()["gated-delta"]
    config.number_of_conv_states = 3  # as Qwen3.8-Flash-Next has
    with pytest.raises(BadModel, match="several states of convolutions"):
        TransformersEngine(save_model(config, tmp_path), rollout_config())
