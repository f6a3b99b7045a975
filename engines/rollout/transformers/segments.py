"""Which rows of a decoding step attend to how many positions: reading keys and values is most of what a step costs.

A step runs over dense rows, and a kernel over one number of positions: that of the longest row. So rows stand with the
longest first, as far as that pays, and kernels run over segments of them, in each of which no row needs much less than
the first. Samples end and leave holes that others fill, so the order wears off; it is made again when as much was read
for nothing since as the rows hold.

What a row's attention gives does not depend on its segment: see `cairn.engines.rollout.transformers.kv_cache`.
"""

import numpy as np

from cairn.engines.rollout.transformers.kv_cache import round_up

WORTH = 2048
"""Positions of a row that take as long to read, in a small model, as another kernel to start."""


def segments_of(positions: np.ndarray) -> np.ndarray:
    """Of rows with their last tokens at `positions` [B]: segments [K, 2], of each the row after its last one and the
    number of positions to attend to, which falls."""
    needed = np.maximum.accumulate(positions[::-1])[::-1] + 1
    rows, begin, found = len(needed), 0, []
    while begin < rows:
        length = round_up(int(needed[begin]))
        end = int(np.count_nonzero(2 * needed > needed[begin]))
        if end < rows and (rows - end) * (length - round_up(int(needed[end]))) < WORTH:
            end = rows
        found.append((end, length))
        begin = end
    return np.array(found, np.int64)


def whole(rows: int, length: int) -> np.ndarray:
    """All rows as one segment."""
    return np.array([(rows, length)], np.int64)


def positions_read(segments: np.ndarray) -> int:
    """In all rows together."""
    return int(np.diff(segments[:, 0], prepend=0) @ segments[:, 1])


class RowOrder:
    """When to put rows in order."""

    def __init__(self) -> None:
        self._wasted = 0
        """Positions that were read since the rows were in order, and would not have been."""

    def better(self, positions: np.ndarray) -> np.ndarray | None:
        """The rows in a better order, longest first, when it is time for it; None otherwise."""
        if len(positions) * (int(positions.max(initial=0)) + 1) < 2 * WORTH:
            return None
        ordered = positions_read(segments_of(np.sort(positions)[::-1]))
        wasted = positions_read(segments_of(positions)) - ordered
        self._wasted += wasted
        if not wasted or self._wasted <= ordered:
            return None
        self._wasted = 0
        return np.argsort(-positions, kind="stable")
