"""A group with a token that is too old is dropped, and others are sampled instead. Prompts with long answers are
dropped more often than others."""

from collections.abc import Mapping


def weigh(tokens: Mapping[int, int], max_age: int) -> None:
    """Return None, which drops the group."""
