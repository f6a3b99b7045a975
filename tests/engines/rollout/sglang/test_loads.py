"""What a server tells of how busy it is."""

import pytest

from cairn.engines.rollout.sglang.engine import SGLangEngine
from cairn.engines.types.types import SamplingParams
from tests.requests import group
from tests.sglang_server import sglang_config
from tests.waiting import wait_for

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]


def test_the_most_that_ran_and_waited_are_told_after_a_generation(engine: SGLangEngine) -> None:
    slots = sglang_config().max_running_requests
    requested = group(0, [5, 6, 7, 8], range(3 * slots), SamplingParams(64))

    def busy() -> bool:
        assert sum(len(samples) for samples in engine.generate(requested)) == 3 * slots
        reported = engine.usage()
        assert reported["running_requests_max"] <= slots
        assert reported["queued_requests_max"] <= 2 * slots
        return reported["running_requests_max"] >= slots / 2 and reported["queued_requests_max"] >= 1

    wait_for(busy)  # a server is asked now and then, which may fall where it has just begun or ended

    list(engine.generate(group(0, [5, 6, 7, 8], [1], SamplingParams(64))))
    assert all(count <= 1 for count in engine.usage().values())
