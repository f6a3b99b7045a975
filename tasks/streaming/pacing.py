"""When a stream is to admit more: as late as keeps its engines at work, so that samples are young when trained on.

| learning | the next prompts are admitted |
|---|---|
| did not wait for any of the last batches | when not even the next batch is admitted |
| waited for one of them, or none has been timed yet | also when engines have less than a batch to work on |

The second holds back where `async_buffer_size` complete groups wait for learning, taken or not.

The bound on age (`rollout.max_age`) holds besides: `cairn.flows.pipeline`.
"""

from collections import deque
from dataclasses import dataclass

from cairn.configs.schema.rollout import RolloutConfig

_LAST = 3
"""Batches for which it counts whether learning waited: one that had a long answer is not the last of its kind."""


@dataclass(frozen=True)
class Backlog:
    """Groups that are admitted, and that no iteration has taken."""

    complete: int
    unfinished: int
    taken: int
    """The newest iteration that has taken some; -1 before the first."""


class Pacing:
    """Of the admissions of one driver. One thread at a time tells it what is learned from; any may ask."""

    def __init__(self, config: RolloutConfig, first: int) -> None:
        """`first`: all iterations before are complete."""
        self._batch, self._buffer = config.rollout_batch_size, config.most_waiting
        self._first = first
        self._learning = first - 1
        self._waited = deque[bool](maxlen=_LAST)

    def learns(self, index: int, *, waited: bool) -> None:
        """Learning from an iteration begins. `waited`: for its batch."""
        if index > self._first:  # for which it waited in any case
            self._waited.append(waited)
        self._learning = index

    def wants_more(self, backlog: Backlog) -> bool:
        """Whether to admit another batch of prompts."""
        taken = max(0, backlog.taken - self._learning) * self._batch
        waiting = taken + backlog.complete
        if waiting + backlog.unfinished < self._batch:
            return True
        is_ahead = bool(self._waited) and not any(self._waited)
        return not is_ahead and backlog.unfinished < self._batch and waiting < self._buffer
