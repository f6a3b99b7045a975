"""Advantages of two algorithms held against each other: the table of samples, the figures of groups, and both for
people."""

import json

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from cairn.storage.records import Record

HEADER = ("group", "samples", "reward", "|A| before", "|A| after", "sign flips", "zero before", "zero after", "corr.")
SAMPLE_HEADER = ("sample", "tokens", "reward", "A before", "A after", "sign flips")

_FLOATS = pa.list_(pa.float32())
COMPARED = pa.schema(
    [
        pa.field("iteration", pa.int64(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("trained_tokens", pa.int32(), nullable=False),
        pa.field("advantage_before", pa.float64()),  # mean over trained tokens; null: there are none
        pa.field("advantage_after", pa.float64()),
        pa.field("sign_flips", pa.int32(), nullable=False),  # trained tokens that were encouraged and are not, or back
        pa.field("advantages_before", _FLOATS, nullable=False),  # of every response token
        pa.field("advantages_after", _FLOATS, nullable=False),
        pa.field("returns_before", _FLOATS, nullable=False),
        pa.field("returns_after", _FLOATS, nullable=False),
    ]
)
"""A row a trained sample, in the order of the batch."""


class Figures(Record):
    """Of the trained tokens of some samples, before and after."""

    samples: int
    trained_tokens: int
    reward: float
    """Mean over the samples."""
    size_before: float | None
    """Mean absolute advantage; None where no token is trained on."""
    size_after: float | None
    sign_flips: float | None
    """Share of tokens whose advantage has the other sign."""
    zero_before: float | None
    """Share of tokens that teach nothing."""
    zero_after: float | None
    correlation: float | None
    """Pearson's; None where either is the same at all tokens."""

    @classmethod
    def of(cls, rewards: np.ndarray, before: np.ndarray, after: np.ndarray) -> "Figures":
        """[N] rewards of samples, and [M] advantages of their trained tokens."""
        before, after = before.astype(np.float64), after.astype(np.float64)
        varies = len(before) > 0 and np.ptp(before) > 0 and np.ptp(after) > 0
        return cls(
            samples=len(rewards),
            trained_tokens=len(before),
            reward=float(rewards.mean(dtype=np.float64)),
            size_before=_mean(np.abs(before)),
            size_after=_mean(np.abs(after)),
            sign_flips=_mean(before * after < 0),
            zero_before=_mean(before == 0),
            zero_after=_mean(after == 0),
            correlation=float(np.corrcoef(before, after)[0, 1]) if varies else None,
        )

    def line(self, name: str) -> tuple[str, ...]:
        """The cells under HEADER."""
        return (
            *(name, str(self.samples), f"{self.reward:.4f}", spelled(self.size_before), spelled(self.size_after)),
            *(_percent(self.sign_flips), _percent(self.zero_before), _percent(self.zero_after)),
            spelled(self.correlation),
        )


class Change(Record):
    """One number, or one option, before and after; None where there is none."""

    before: JsonValue
    after: JsonValue


class SampleChange(Record):
    """A sample's mean advantage over its trained tokens."""

    group_id: int
    sample_index: int
    reward: float
    trained_tokens: int
    advantage_before: float | None
    advantage_after: float | None
    sign_flips: int

    def line(self) -> tuple[str, ...]:
        """The cells under SAMPLE_HEADER."""
        return (
            *(str(self.sample_index), str(self.trained_tokens), f"{self.reward:.4f}"),
            *(spelled(self.advantage_before), spelled(self.advantage_after), str(self.sign_flips)),
        )


class WhatIf(Record):
    """What the advantages of an iteration would have been."""

    run: str
    iteration: int
    options: dict[str, Change]
    """Of `algorithm`, those that differ from the iteration's own."""
    overall: Figures
    groups: dict[int, Figures]
    """By group id, in the order of the batch."""
    samples: list[SampleChange]
    metrics: dict[str, Change]
    """Of the advantage step, those that would have been others."""

    def conclusion(self) -> str:
        """All of it in one sentence."""
        one = self.overall
        changed = ", ".join(f"{name}={_value(change.after)}" for name, change in self.options.items())
        return (
            f"with {changed or 'the code of today'}, {_percent(one.sign_flips)} of the {one.trained_tokens:,} trained "
            f"tokens of iteration {self.iteration} of run {self.run} change the sign of their advantage, and "
            f"{_percent(one.zero_before)} → {_percent(one.zero_after)} have none; the correlation is "
            f"{spelled(one.correlation)}"
        )


def spelled(value: float | None) -> str:
    """A number for people."""
    return "–" if value is None else f"{value:.4f}"


def _value(option: JsonValue) -> str:
    return option if isinstance(option, str) else json.dumps(option)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
