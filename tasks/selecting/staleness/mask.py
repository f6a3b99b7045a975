"""Tokens that are too old are masked: they are left out of the loss, and the others of their group are trained on."""

from collections.abc import Mapping


def weigh(tokens: Mapping[int, int], max_age: int) -> dict[int, float]:
    """Return weight 0 for every age above the bound."""
    return {age: 0.0 for age in tokens if age > max_age}
