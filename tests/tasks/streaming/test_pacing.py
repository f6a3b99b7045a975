"""How far a stream admits ahead of learning: as little as keeps engines at work."""

import pytest

from cairn.configs.schema.rollout import RolloutConfig
from cairn.tasks.streaming.stream import Backlog, Pacing

CONFIG = RolloutConfig(num_rollout=9, rollout_batch_size=4, rollout_max_response_len=8, pipeline="streaming", max_age=3)


def pacing(*waited: bool, buffer: int | None = None) -> Pacing:
    """Of a driver that has learned from an iteration for each, and from the first."""
    found = Pacing(CONFIG.model_copy(update={"async_buffer_size": buffer}), 0)
    for index, waits in enumerate((True, *waited)):
        found.learns(index, waited=waits)
    return found


@pytest.mark.parametrize(
    ("of", "complete", "unfinished", "taken_ahead", "wanted"),
    [
        pytest.param(pacing(False), 2, 1, 0, True, id="the next batch lacks a group"),
        pytest.param(pacing(False), 2, 2, 0, False, id="the next batch is admitted, and nobody waits for it"),
        pytest.param(pacing(False), 0, 0, 1, False, id="the next batch is there already"),
        pytest.param(pacing(True), 2, 2, 0, True, id="learning waits, and engines run short of work"),
        pytest.param(pacing(True), 0, 4, 0, False, id="engines have a whole batch to work on"),
        pytest.param(pacing(True), 4, 1, 0, False, id="as many are complete as may wait"),
        pytest.param(pacing(True), 1, 1, 1, False, id="as many are complete, taken or not"),
        pytest.param(pacing(True, buffer=8), 4, 1, 0, True, id="more may wait"),
        pytest.param(pacing(True, buffer=2), 2, 2, 0, False, id="fewer may wait"),
        pytest.param(pacing(True, False, False), 2, 2, 0, True, id="learning waited not long ago"),
        pytest.param(pacing(True, False, False, False), 2, 2, 0, False, id="learning waited long ago"),
        pytest.param(pacing(), 2, 2, 0, True, id="nobody knows yet who waits"),
    ],
)
def test_more_is_admitted_when_the_next_batch_or_the_engines_need_it(
    of: Pacing, complete: int, unfinished: int, taken_ahead: int, wanted: bool
) -> None:
    learning = of._learning
    assert of.wants_more(Backlog(complete, unfinished, learning + taken_ahead)) is wanted
