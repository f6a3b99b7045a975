"""Tokens that are older than `rollout.max_age` allows, although that option paces the stream. One policy a file,
`weigh(tokens, max_age) -> weights`."""

import math
from collections.abc import Mapping

from cairn.configs.kinds import STALENESS
from cairn.configs.plugins import BadPlugin


def stale_weights(name: str, tokens: Mapping[int, int], max_age: int) -> tuple[float, ...] | None:
    """Return the decision of `rollout.staleness_policy` on a group with tokens that are too old.

    The result has the weights, from 0 to 1, of tokens of the ages max_age + 1, max_age + 2, … up to the oldest; None
    where the group is to be dropped. Raises BadPlugin if the policy is not available, takes other arguments or returns
    something else.

    Args:
        tokens: number of the group's trained tokens of each age.
    """
    weights = STALENESS.load(name)(dict(tokens), max_age)
    if weights is None:
        return None
    ages = [age for age in tokens if age > max_age]
    if not isinstance(weights, Mapping) or not all(_is_weight(weights.get(age)) for age in ages):
        raise BadPlugin(
            f"the staleness policy {name!r} returned {weights!r}: let it return a weight from 0 to 1 for each age "
            f"above {max_age} ({', '.join(map(str, sorted(ages)))}), or None to drop the group"
        )
    return tuple(float(weights[age]) if age in tokens else 0.0 for age in range(max_age + 1, max(ages) + 1))


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and 0 <= value <= 1
