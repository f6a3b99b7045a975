"""The trained tokens of a batch, of all samples one after the other, and sums over what follows in each sample.

No sample is padded to the length of another: a batch takes memory for its tokens, however uneven they are, and the sums
of all samples are taken together, from the last token of each to the first.
"""

from collections.abc import Sequence

import numpy as np


class TrainedTokens:
    """M tokens of N samples; a sample may have none."""

    def __init__(self, loss_masks: Sequence[np.ndarray]) -> None:
        """`loss_masks`: [T_i] of each sample, 1 at trained tokens."""
        self._lengths = np.array([len(mask) for mask in loss_masks], np.int64)
        self._trained = np.concatenate([np.zeros(0, bool), *(mask.astype(bool) for mask in loss_masks)])
        of_tokens = np.repeat(np.arange(len(loss_masks)), self._lengths)
        self.samples = of_tokens[self._trained]
        """[M]: the sample of each."""
        self.counts = np.bincount(self.samples, minlength=len(loss_masks))
        """[N]: how many each sample has."""
        self.ending = np.flatnonzero(self.counts)
        """Samples that have some …"""
        self.last = np.cumsum(self.counts)[self.ending] - 1
        """… and the last of each, as a place among the M."""

    def of(self, fields: Sequence[np.ndarray]) -> np.ndarray:
        """[T_i] of each sample → [M] float64."""
        return np.concatenate([np.zeros(0), *fields])[self._trained].astype(np.float64)

    def spread(self, values: np.ndarray) -> list[np.ndarray]:
        """[M] → [T_i] float32 of each sample, 0 at tokens that are not trained on."""
        whole = np.zeros(len(self._trained), np.float32)
        whole[self._trained] = values
        ends = np.cumsum(self._lengths).tolist()
        return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def following(self, values: np.ndarray) -> np.ndarray:
        """[M] → [M]: that of the next trained token of the sample, 0 after its last."""
        moved = np.append(values[1:], np.zeros(min(1, len(values))))
        moved[self.last] = 0
        return moved

    def discounted(self, values: np.ndarray, factor: float) -> np.ndarray:
        """[M] → [M] float64: S_t = x_t + factor · S_{t+1} within each sample, nothing after its last token."""
        longest_first = np.argsort(-self.counts, kind="stable")
        rank = np.empty_like(longest_first)
        rank[longest_first] = np.arange(len(rank))
        # Column k has the k-th token from the end of every sample that is so long, the longest samples first.
        widths = np.searchsorted(np.sort(-self.counts), -np.arange(self.counts.max(initial=0)), side="left")
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)])
        from_end = np.cumsum(self.counts)[self.samples] - 1 - np.arange(len(self.samples))
        places = starts[from_end] + rank[self.samples]
        columns = np.empty(len(values))
        columns[places] = values
        for later, start, width in zip(starts, starts[1:], widths[1:], strict=False):
            columns[start : start + width] += factor * columns[later : later + width]
        return columns[places]
