"""What a sample's code was given: one record for each of its calls, which is given again where the code runs again.

Plain values, as they go from the process of user code to whoever makes them durable.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from cairn.engines.trajectories import SampleKey, SampleRequest, Segment


class CallKind(StrEnum):
    """What was asked."""

    SAMPLE = "sample"
    """The policy, for a continuation: `ctx.sample`."""
    TOOL = "tool"
    """The world: `ctx.call`."""
    JUDGE = "judge"
    """A grader: `ctx.judge`."""
    NOW = "now"
    """The clock: `ctx.now`."""


@dataclass(frozen=True)
class CallRecord:
    """A call of a sample's code, and its answer; or the intent to make one that has effects."""

    group_id: int
    index: int
    """Of the sample in its group."""
    call: str
    """Its id within the sample: see `cairn.engines.episodes.call_ids`."""
    kind: CallKind
    name: str
    """Of the tool or the grader; empty of the policy and the clock."""
    arguments_digest: str
    """Of what was asked: another digest is another call."""
    order: int | None = None
    """Which answer of the sample it was, from 0, as its code was given them one after the other; None of an intent,
    which has no answer yet."""
    turn: int = 0
    """Answers of the policy that the code had before it made the call."""
    arguments: str | None = None
    """As JSON; None of the policy and the clock."""
    result: str | None = None
    """As JSON; None where it failed, and of the policy, whose answer is `segment`."""
    error: str | None = None
    """Why it failed; None where it did not."""
    reason: str | None = None
    """The same of a tool, in a word: `cairn.engines.tools.errors.Reason`."""
    segment: Segment | None = None
    """What the policy sampled."""
    given: int = 0
    """Tokens that the policy went on from."""
    started_at: float = 0.0
    """Seconds since the epoch."""
    seconds: float = 0.0
    """Until it was answered."""

    @property
    def key(self) -> SampleKey:
        """Of its sample."""
        return self.group_id, self.index

    @property
    def told(self) -> str:
        """The call, for messages."""
        what = f"{self.kind} {self.name}".strip()
        tells = self.arguments and self.kind is not CallKind.SAMPLE  # of the policy it is a digest
        return f"call {self.call} ({what})" + (f" with {self.arguments}" if tells else "")


NEVER = -1
"""Acknowledged in place of a number: nothing that is awaited becomes durable any more."""


@dataclass(frozen=True)
class Recorded:
    """Records that came up together, in the order in which they did."""

    number: int
    """Counts what one process said."""
    records: list[CallRecord]
    awaited: bool
    """Whether a sample waits until they are durable, with all before them: for `acknowledge(number)`."""


def take_records(samples: dict[SampleKey, SampleRequest], records: Iterable[CallRecord]) -> None:
    """Add what samples were given since, so that they are given that again."""
    found: dict[SampleKey, list[CallRecord]] = {}
    for record in records:
        found.setdefault(record.key, []).append(record)
    for key in found.keys() & samples.keys():
        samples[key] = replace(samples[key], recorded=(*samples[key].recorded, *found[key]))
