"""Repeat the prompts that the policy solves only sometimes: all others teach nothing, or nothing yet.

A group whose pass rate is in [`low`, `high`] has a spread of rewards, and so an advantage (Bae et al. 2025, "Online
Difficulty Filtering for Reasoning Oriented Reinforcement Learning", equation 8). Its prompt is appended to a queue;
each draw takes the prompts that have waited longest. A repeated prompt is queued again only if its new pass rate is in
that range too. The data's own order fills the rest of each draw, so every prompt is seen once an epoch in any case.
"""

from collections.abc import Sequence
from typing import Any


def choose(state: Any, results: Sequence[Any], count: int, config: Any) -> tuple[list[int], list[int]]:
    """Return the prompts of the next draw, and the remaining queue as the new state, the longest waiting first.

    The queue has at most `max_waiting` prompts.
    """
    waiting: list[int] = list(state or [])
    for group in results:
        if group.pass_rate is None:  # its grader failed, which says nothing of the prompt
            continue
        if group.prompt_index in waiting:
            waiting.remove(group.prompt_index)
        if config.low <= group.pass_rate <= config.high:
            waiting.append(group.prompt_index)
    waiting = waiting[-config.max_waiting :]
    return waiting[:count], waiting[count:]
