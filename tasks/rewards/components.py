"""Rewards by their names, of a grader that gives several: numbers among what it returns, and `reward`, the sample's
own, whatever `reward.reward_key` calls it."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from cairn.tasks.rewards.pool import Graded
from cairn.tasks.rewards.worker import finite

SAMPLE_REWARD = "reward"
"""The name of the sample's own reward."""


def by_name(reward: float, components: Mapping[str, Any] | None) -> dict[str, Any]:
    """What was said of a sample, by its names."""
    return {**(components or {}), SAMPLE_REWARD: reward}


def is_number(value: Any) -> bool:
    """Whether a value is a reward: a finite number, or true or false."""
    if not isinstance(value, int | float):
        return False
    try:
        finite(value)
    except (ValueError, OverflowError):
        return False
    return True


def with_rewards(graded: Graded, keys: Collection[str], grader: str) -> Graded:
    """A graded sample; failed, where one of `keys` is no number among its components."""
    components = graded.components or {}
    missing = [key for key in keys if key != SAMPLE_REWARD and not is_number(components.get(key))]
    if graded.reward is None or not missing:
        return graded
    key, names = missing[0], ", ".join(map(repr, sorted(components))) or "nothing"
    said = f"{components[key]!r:.100} as {key!r}" if key in components else f"no {key!r}, but {names}"
    return replace(
        graded,
        reward=None,
        error=f"the grader {graded.grader or grader!r} gave {said} beside the reward, and algorithm.gdpo_reward_keys "
        f"names {key!r}: let it return a number under this name, or leave the name out",
    )
