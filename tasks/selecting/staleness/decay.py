"""Tokens that are too old count less with age, by 1 / (1 + age - max_age): a half, a third, … The weight is that of
TorchRL's `StalenessAwareSampler`, for the staleness beyond the bound."""

from collections.abc import Mapping


def weigh(tokens: Mapping[int, int], max_age: int) -> dict[int, float]:
    """Return the weights: a half for the first age above the bound."""
    return {age: 1 / (1 + age - max_age) for age in tokens if age > max_age}
