"""Pass rates and scores are shares of right answers, whatever the grader pays for one."""

import pytest

from cairn.configs.schema.data import CurriculumConfig
from cairn.tasks.data.stream import GroupResult
from cairn.tasks.rewards.grader import share_of_right
from cairn.tasks.selecting.curricula.pass_rate import choose


def test_a_prompt_comes_back_by_its_share_of_right_answers_under_every_grader() -> None:
    config = CurriculumConfig(policy="pass_rate", low=0.1, high=0.9)
    for share, returns in ((0.0, False), (0.05, False), (0.25, True), (0.5, True), (0.75, True), (0.95, False)):
        for grader, mean in (("math", share), ("dapo", 2 * share - 1), ("boxed_dapo", 2 * share - 1)):
            rate = share_of_right(mean, grader)
            assert rate == pytest.approx(share)
            group = GroupResult(0, 7, None, {}, mean, 0.5, True, None, rate)
            assert choose(None, [group], 1, config)[0] == [7] * returns
    ungraded = GroupResult(0, 7, None, {}, None, None, False, "failed_sample", None)
    assert choose([7], [ungraded], 0, config) == ([], [7])
