"""A real SGLang server behind the interface of a rollout engine."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from cairn.engines.rollout.sglang.engine import SGLangEngine
from cairn.engines.types.errors import EngineError, RequestRefused
from cairn.engines.types.types import Completion, FinishReason, GenerateRequest, SamplingParams
from tests.engines.rollout.models import full_log_probs
from tests.requests import group, ids
from tests.sglang_server import once_decoding

pytestmark = pytest.mark.timeout(600)


def requests(count: int, samples: int = 4, **params: object) -> list[GenerateRequest]:
    inputs = SamplingParams(**{"max_new_tokens": 16, **params})  # type: ignore[arg-type]
    return [one for index in range(count) for one in group(index, [5 + index, 6, 7, 8], range(samples), inputs)]


def generate(engine: SGLangEngine, requested: list[GenerateRequest]) -> list[Completion]:
    return [completion for part in engine.generate(requested) for completion in part]


def worst_difference(model: PreTrainedModel, requested: list[GenerateRequest], done: list[Completion]) -> float:
    """Largest difference between the server's log-probs and Hugging Face's."""
    worst = 0.0
    requests = {request.request_id: request for request in requested}
    for completion in done:
        request = requests[completion.request_id]
        ids = torch.tensor([[*request.input_ids, *completion.response_ids.tolist()]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.input_ids) - 1 : -1].float()
        log_probs = torch.log_softmax(logits / request.sampling_params.temperature, -1)
        expected = log_probs.gather(1, torch.tensor(completion.response_ids, dtype=torch.int64)[:, None])[:, 0]
        worst = max(worst, float(np.abs(expected.numpy() - completion.log_probs).max()))
    return worst


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_sample_comes_with_the_log_probs_of_its_tokens(
    engine: SGLangEngine, model: PreTrainedModel, temperature: float
) -> None:
    requested = requests(6, temperature=temperature)
    done = generate(engine, requested)
    assert sorted(c.request_id for c in done) == sorted(ids(6, 4))
    assert all(1 <= len(c.response_ids) == len(c.log_probs) <= 16 for c in done)
    assert {c.finish_reason for c in done} <= {FinishReason.STOP, FinishReason.LENGTH}
    assert worst_difference(model, requested, done) < 1e-4


@pytest.mark.parametrize("cut", [{"top_p": 0.05, "top_k": 40}, {"top_k": 3}])
def test_a_sample_by_top_p_and_top_k_comes_with_what_its_tokens_were_drawn_from(
    engine: SGLangEngine, model: PreTrainedModel, cut: dict[str, Any]
) -> None:
    requested = requests(6, temperature=0.8, return_sampling_support=True, **cut)
    done = generate(engine, requested)
    sizes = []
    for completion in done:
        retained = completion.kept
        assert retained is not None
        assert len(retained) == len(completion.response_ids)
        assert retained.first_without(completion.response_ids) is None
        (request,) = [one for one in requested if one.request_id == completion.request_id]
        expected = full_log_probs(model, request, completion)
        assert np.abs(expected - completion.log_probs).max() < 1e-4
        sizes += retained.counts.tolist()
    assert min(sizes) >= 1
    assert max(sizes) <= cut["top_k"]
    assert ("top_p" in cut) == (min(sizes) < cut["top_k"]), "the witness of what cut the vocabulary"


def test_what_a_sample_was_drawn_from_is_refused_beyond_what_the_server_reports(engine: SGLangEngine) -> None:
    with pytest.raises(RequestRefused, match="return_sampling_mask requires"):
        generate(engine, requests(1, 1, top_p=0.8, return_sampling_support=True))


def test_stop_tokens_end_a_response_and_are_its_last_token(engine: SGLangEngine) -> None:
    every = tuple(range(0, 400, 2))
    done = generate(engine, requests(4, stop_token_ids=every, max_new_tokens=64))
    stopped = [c for c in done if c.finish_reason == FinishReason.STOP]
    assert stopped
    assert all(c.response_ids[-1] % 2 == 0 for c in stopped)
    assert all((c.response_ids[:-1] % 2 == 1).all() for c in stopped)


@pytest.mark.slow
def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(
    engine_with_tokenizer: SGLangEngine, sglang_model: Path
) -> None:
    strings, tokenizer = ("7", "e"), AutoTokenizer.from_pretrained(sglang_model)
    requested = requests(6, stop=strings, max_new_tokens=64)
    plain = {c.request_id: c for c in generate(engine_with_tokenizer, requests(6, max_new_tokens=64))}
    done = generate(engine_with_tokenizer, requested)
    ends: set[str] = set()
    for completion in done:
        ids = completion.response_ids
        assert len(ids) == len(completion.log_probs)
        before, text = tokenizer.decode(ids[:-1]), tokenizer.decode(ids)
        assert not any(string in before for string in strings)
        result = [string for string in strings if string in text]
        if result:
            assert completion.finish_reason == FinishReason.STOP
        ends.update(result)
    assert ends
    assert any(len(plain[c.request_id].response_ids) > len(c.response_ids) for c in done)


def test_a_server_without_a_tokenizer_refuses_stop_strings(engine: SGLangEngine) -> None:
    with pytest.raises(RequestRefused, match="requires tokenizer"):
        generate(engine, requests(1, 1, stop=("END",)))


def test_new_weights_are_served_under_their_version(engine: SGLangEngine, model: PreTrainedModel) -> None:
    before = engine.get_weight_version()
    assert before is not None
    changed = {name: value.detach() * 1.1 for name, value in model.named_parameters()}
    halves = [dict(list(changed.items())[::2]), dict(list(changed.items())[1::2])]
    engine.begin_weight_update(before + 5)
    assert engine.get_weight_version() is None
    with pytest.raises(EngineError, match="weight update"):
        generate(engine, requests(1))
    engine.update_weights(halves[0])
    with pytest.raises(EngineError, match=f"lacks {len(halves[1])} weights"):
        engine.end_weight_update()
    engine.begin_weight_update(before + 6)
    for half in halves:
        engine.update_weights(half)
    engine.end_weight_update()
    assert engine.get_weight_version() == before + 6
    updated = copy.deepcopy(model)
    updated.load_state_dict(changed, strict=False)
    requested = requests(4)
    done = generate(engine, requested)
    assert {int(version) for c in done for version in c.weight_versions} == {before + 6}
    assert worst_difference(updated, requested, done) < 1e-4


def test_a_weight_that_the_model_does_not_have_is_refused(engine: SGLangEngine) -> None:
    version = engine.get_weight_version()
    assert version is not None
    engine.begin_weight_update(version)
    with pytest.raises(EngineError, match=r"no weight model\.nothing"):
        engine.update_weights({"model.nothing": torch.zeros(1)})


def test_an_aborted_generation_gives_all_as_far_as_it_came(engine: SGLangEngine) -> None:
    with once_decoding(engine.health, engine.abort):
        done = generate(engine, requests(16, max_new_tokens=400, top_k=40, return_sampling_support=True))
    assert len(done) == 64
    assert FinishReason.ABORT in {c.finish_reason for c in done}
    begun = [c for c in done if len(c.response_ids)]
    assert begun
    for completion in begun:
        assert completion.kept is not None
        assert len(completion.kept) == len(completion.response_ids) == len(completion.log_probs)
        assert completion.kept.first_without(completion.response_ids) is None
    assert len(generate(engine, requests(2))) == 8


def test_what_cannot_be_served_is_refused_before_anything_is_generated(engine: SGLangEngine) -> None:
    too_long = group(1, [3] * 5000, [1], SamplingParams(4))
    with pytest.raises(RequestRefused, match="leaves no room"):
        generate(engine, [*requests(1), *too_long])


def test_health_tells_the_server_and_its_load(engine: SGLangEngine) -> None:
    health = engine.health()
    assert health["url"].startswith("http://127.0.0.1:")
    assert Path(health["log"]).read_text()
