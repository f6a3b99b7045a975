"""Samples of several turns on a real SGLang server."""

import pytest

from cairn.engines.episodes.samples import SampleEngine
from cairn.engines.rollout.sglang.engine import SGLangEngine
from cairn.engines.types import SamplingParams
from tests.engines.episodes.test_samples import all_of, asked, users

pytestmark = pytest.mark.timeout(600)


def test_a_later_turn_begins_while_another_sample_is_still_decoded(engine: SGLangEngine) -> None:
    samples, params = asked([4, 4], *[[900]] * 4), SamplingParams(max_new_tokens=900)
    stream = SampleEngine(engine.open, engine.abort).generate(samples, params, users())
    ended = [*all_of(stream).values()]
    assert {sample.index: sample.error for sample in ended} == dict.fromkeys(range(5))
    lengths = {sample.index: len(sample.trajectory.response_ids) for sample in ended}
    assert lengths[0] <= 4 + 3 + 4 < max(lengths.values())
    assert ended[-1].index != 0, "its second turn did not wait for the long samples"
