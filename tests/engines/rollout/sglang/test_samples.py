"""Samples of several turns on a real SGLang server."""

import pytest

from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.engines.rollout.sglang.engine import SGLangEngine
from cairn.engines.types.types import FinishReason, SamplingParams
from tests.engines.agents.episodes.test_samples import all_of, asked, users
from tests.engines.rollout.transformers.test_cut_samples import LENGTH, differences, generating, in_their_rounds
from tests.engines.rollout.transformers.test_cut_samples import asked as asked_in_pairs

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]


def test_a_later_turn_begins_while_another_sample_is_still_decoded(engine: SGLangEngine) -> None:
    samples, params = asked([4, 4], *[[900]] * 4), SamplingParams(max_new_tokens=900)
    stream = SampleEngine(engine.open, engine.abort).generate(samples, params, users())
    ended = [*all_of(stream).values()]
    assert {sample.index: sample.error for sample in ended} == dict.fromkeys(range(5))
    lengths = {sample.index: len(sample.trajectory.response_ids) for sample in ended}
    assert lengths[0] <= 4 + 3 + 4 < max(lengths.values())
    assert ended[-1].index != 0, "its second turn did not wait for the long samples"


def test_a_sample_that_is_cut_ends_where_it_would_have(engine: SGLangEngine) -> None:
    """The server says LENGTH of a token that ends a sample and is the last that it may have."""
    greedy = SamplingParams(LENGTH, temperature=0, stop_token_ids=tuple(range(60)))  # it draws by no seed
    generate = generating(SampleEngine(engine.open, engine.abort), greedy)
    result, ended = in_their_rounds(generate, 4)
    uncut = all_of(generate(asked_in_pairs()))
    assert differences(result, uncut) == []
    stopped = {key for key, one in uncut.items() if one.finish_reason == FinishReason.STOP}
    assert any(len(uncut[key].trajectory.response_ids) == 4 * ended[key] for key in stopped), "where others are cut"


def test_a_sample_that_goes_on_has_none_of_its_own_tokens_from_the_cache(engine: SGLangEngine) -> None:
    result, ended = in_their_rounds(generating(SampleEngine(engine.open, engine.abort)), 4)
    assert max(ended.values()) > 1
    assert all(one.trajectory.cached_tokens <= 4 * ended[key] for key, one in result.items()), "a prompt has 4 tokens"
