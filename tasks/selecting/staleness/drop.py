"""A group with a token that is too old is dropped, and others are sampled in its place. Prompts whose answers are long
are dropped more often than others."""

from collections.abc import Mapping


def weigh(tokens: Mapping[int, int], max_age: int) -> None:
    """Says nothing of its tokens."""
