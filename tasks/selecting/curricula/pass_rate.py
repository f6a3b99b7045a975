"""Prompts that the policy gets right now and then come back: the others have nothing to teach, or not yet.

A group whose pass rate lies in [`low`, `high`] has a spread of rewards, so an advantage (Bae et al. 2025, "Online
Difficulty Filtering for Reasoning Oriented Reinforcement Learning", equation 8). Its prompt waits, behind those that
wait already; each draw takes first those that have waited longest. One that was drawn again waits again only if its new
pass rate lies there too. What was never seen comes from the data's own order, which fills the rest of each draw, so
everything is seen once an epoch whatever comes back.
"""

from collections.abc import Sequence
from typing import Any


def choose(state: Any, results: Sequence[Any], count: int, config: Any) -> tuple[list[int], list[int]]:
    """The `state` is those that wait, the longest first; at most `max_waiting`."""
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
