"""What went through a session: each request's tokens and those that the policy sampled after them, and the trajectories
that they make.

An exchange goes on from another one where its prompt begins with that one's tokens, exactly. From each exchange that
none goes on from, the chain back to the first one is a trajectory, whose prompt is the first one's; what lies between
two exchanges the world gave. An exchange that two chains share is trained on in the first of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cairn.engines.trajectories import Segment, Trajectory


@dataclass(eq=False)
class Exchange:
    """A request, and what the policy sampled."""

    prompt_ids: np.ndarray
    """[P] int32: all that it was sampled after."""
    segment: Segment
    parent: "Exchange | None"
    """That it goes on from."""
    ids: np.ndarray = field(init=False)
    """[P + T] int32."""
    lost: bool = False
    """Whether the client was gone when it was to be told."""
    retold: bool = False
    """Whether a later prompt has it in its history in other tokens."""

    def __post_init__(self) -> None:
        self.ids = np.concatenate([self.prompt_ids, self.segment.ids])

    def is_before(self, prompt_ids: np.ndarray) -> bool:
        """Whether a prompt begins with its tokens."""
        return len(prompt_ids) >= len(self.ids) and np.array_equal(prompt_ids[: len(self.ids)], self.ids)

    @property
    def chain(self) -> "list[Exchange]":
        """All that it goes on from, and itself."""
        found = [self]
        while found[-1].parent is not None:
            found.append(found[-1].parent)
        return found[::-1]


def parent_of(prompt_ids: np.ndarray, exchanges: Sequence[Exchange]) -> Exchange | None:
    """The exchange that a prompt goes on from: the longest of those that it begins with."""
    return max((one for one in exchanges if one.is_before(prompt_ids)), key=lambda one: len(one.ids), default=None)


def trajectories(exchanges: Sequence[Exchange]) -> list[Trajectory]:
    """Of exchanges in the order in which they ended. One that was lost, and that nobody went on from, is of none."""
    parents = {exchange.parent for exchange in exchanges}
    trained, found = set[Exchange](), list[Trajectory]()
    for last in exchanges:
        if last in parents or last.lost:
            continue
        chain, segments = last.chain, list[Segment]()
        end = len(chain[0].prompt_ids)
        for exchange in chain:
            if len(exchange.prompt_ids) > end:
                segments.append(Segment.given(exchange.prompt_ids[end:]))
            segments.append(_masked(exchange.segment) if exchange in trained else exchange.segment)
            end = len(exchange.ids)
        retold = sum(len(one.segment) for one in chain if one.retold and one not in trained)
        trained.update(chain)
        found.append(Trajectory(segments, chain[0].prompt_ids, retold=retold))
    return found


def _masked(segment: Segment) -> Segment:
    return replace(segment, loss_mask=np.zeros_like(segment.loss_mask))
