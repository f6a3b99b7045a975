"""Which groups are worth training on."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from cairn.configs.plugins import BadPlugin
from cairn.tasks.selecting.filters import get_filter
from cairn.tasks.selecting.filters.sample import Filter, FilterDecision


@pytest.mark.parametrize("name", ["check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"])
def test_groups_whose_rewards_differ_are_kept(name):
    fallback = name.endswith("fallback")
    decide = get_filter(name)
    for rewards in ([0, 1, 0, 0], [1, 0], [0.5, 0.5, 0.5, 0.6], [0, 3e-6]):
        assert decide(np.array(rewards, float)) == FilterDecision(True, None, fallback)


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0.0] * 8, "zero_std_0.0"),
        ([1.0] * 8, "zero_std_1.0"),
        ([0.1] * 3, "zero_std_0.1"),  # the mean of three 0.1 is not 0.1 in floating point
        ([-0.9] * 7, "zero_std_-0.9"),
        ([0.5, 0.5 + 1e-7], "zero_std_0.5"),
        ([0.3], "zero_std_0.3"),
    ],
)
def test_groups_of_equal_rewards_are_dropped_with_the_reward_as_the_reason(rewards, reason):
    assert get_filter("check_reward_nonzero_std")(np.array(rewards)) == FilterDecision(False, reason)


def test_the_fallback_offers_groups_of_equal_rewards_for_a_batch_that_stays_short():
    decision = get_filter("check_reward_nonzero_std_with_fallback")(np.ones(4))
    assert decision == FilterDecision(False, "zero_std_1.0", keep_when_insufficient=True)


def test_without_a_filter_every_group_is_kept():
    assert get_filter(None)(np.zeros(4)) == FilterDecision(True)


def test_a_filter_of_ones_own_is_found_by_file(tmp_path: Path):
    (tmp_path / "filters.py").write_text(
        "from cairn.tasks.selecting.filters import FilterDecision\n"
        "def some_right(rewards):\n    return FilterDecision(rewards.mean() > 0.25, 'too_hard')\n"
    )
    decide = get_filter(f"{tmp_path}/filters.py:some_right")
    assert decide(np.array([0.0, 1.0])).keep
    assert not decide(np.array([0.0, 0.0])).keep


def test_an_unknown_filter_is_named_beside_the_known_ones():
    with pytest.raises(BadPlugin, match="no filter 'nonzero_std': use one of check_reward_nonzero_std"):
        get_filter("nonzero_std")


def own_filter(tmp_path: Path, code: str) -> Filter:
    file = tmp_path / f"mine_{hashlib.sha256(code.encode()).hexdigest()[:8]}.py"
    file.write_text(code)
    return get_filter(f"{file}:keep")


def test_a_filter_of_ones_own_may_say_yes_or_no(tmp_path: Path) -> None:
    keep = own_filter(tmp_path, "def keep(rewards):\n    return rewards.std() > 0\n")
    assert keep(np.array([0.0, 1.0])) == FilterDecision(keep=True)
    assert keep(np.array([1.0, 1.0])) == FilterDecision(keep=False, reason="not_kept")


def test_a_filter_that_says_nothing_is_named(tmp_path: Path) -> None:
    keep = own_filter(tmp_path, "def keep(rewards):\n    pass\n")
    with pytest.raises(BadPlugin, match=r"keep' returned None: let it return true, false or a cairn.FilterDecision"):
        keep(np.zeros(2))


@pytest.mark.parametrize("code", ["def keep(group, rewards):\n    pass\n", "async def keep(rewards):\n    pass\n"])
def test_a_filter_of_another_kind_is_refused_before_anything_starts(tmp_path: Path, code: str) -> None:
    with pytest.raises(BadPlugin, match=r"let it (take \(rewards\)|be a plain)"):
        own_filter(tmp_path, code)
