"""What becomes of tokens that are older than `rollout.max_age` allows, though it paces a stream. One policy a file,
`weigh(tokens, max_age) -> weights`."""

import math
from collections.abc import Mapping

from cairn.configs.kinds import STALENESS
from cairn.configs.plugins import BadPlugin


def stale_weights(name: str, tokens: Mapping[int, int], max_age: int) -> tuple[float, ...] | None:
    """What `rollout.staleness_policy` says of a group with tokens that are too old: the weights, from 0 to 1, of those
    of the ages max_age + 1, max_age + 2, … as far as there are any; None where the group is to be dropped.

    Args:
        tokens: how many of the group's trained tokens are of each age.

    Raises BadPlugin if it cannot be had, takes other arguments or returns something else.
    """
    found = STALENESS.load(name)(dict(tokens), max_age)
    if found is None:
        return None
    ages = [age for age in tokens if age > max_age]
    if not isinstance(found, Mapping) or not all(_is_weight(found.get(age)) for age in ages):
        raise BadPlugin(
            f"the staleness policy {name!r} returned {found!r}: let it return a weight from 0 to 1 for each age above "
            f"{max_age} ({', '.join(map(str, sorted(ages)))}), or None to drop the group"
        )
    return tuple(float(found[age]) if age in tokens else 0.0 for age in range(max_age + 1, max(ages) + 1))


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and 0 <= value <= 1
