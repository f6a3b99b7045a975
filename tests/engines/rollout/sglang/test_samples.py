"""Samples of several turns on a real SGLang server."""

import pytest

from cairn.engines.rollout.samples import SampleEngine
from cairn.engines.rollout.sglang.engine import SGLangEngine
from cairn.engines.types import SamplingParams
from tests.engines.rollout.test_samples import asked, users

pytestmark = pytest.mark.timeout(600)


def test_a_later_turn_begins_while_another_sample_is_still_decoded(engine: SGLangEngine) -> None:
    samples, params = asked([900], [4, 4]), SamplingParams(max_new_tokens=900)
    stream = SampleEngine(engine.open, engine.abort).generate(samples, params, users())
    ended = [sample for part in stream for sample in part]
    assert [(sample.index, sample.error) for sample in ended] == [(1, None), (0, None)]
    assert [len(sample.trajectory.response_ids) for sample in ended] == [4 + 3 + 4, 900]
