"""What a sample goes through: the words of `async def generate(ctx, sample)`. Plain values: numpy arrays and numbers.

A trajectory begins after the sample's prompt, or after one of its own, and is made of segments, in order: tokens that
the policy sampled, and tokens that the world gave (the result of a tool, the next question), which nothing is learnt
from. Token ids go in and come out: text is never tokenised again. A sample may go through several, as where an agent
goes on with a part of its context, or hands work to another: they are graded as one, and trained on as sequences of
their own.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

from cairn.engines.types.images import Image
from cairn.engines.types.types import Completion, FinishReason, KeptTokens, first_read, of_both

FIRST_CALL = "0"
"""Id of a sample's first call of `ctx.sample`."""
SampleKey = tuple[int, int]
"""(group_id, index in the group)."""


class BadTrajectory(Exception):
    """What `generate` returned is no trajectory of its sample: the code is to be corrected, a new try does not help."""


@dataclass(frozen=True)
class Segment:
    """T tokens that came at once."""

    ids: np.ndarray
    """[T] int32."""
    loss_mask: np.ndarray
    """[T] uint8: 1 where the token may be trained on. Of what was sampled all are 1, unless user code says less."""
    call: str | None = None
    """Id of the call of `ctx.sample` that sampled it; None: the world gave it, and all that follows is empty."""
    log_probs: np.ndarray | None = None
    """[T] float32, see `cairn.engines.types.types.Completion`."""
    weight_versions: np.ndarray | None = None
    """[T] int32: of the weights that each token was sampled from."""
    seed: int | None = None
    """Of all draws of the call."""
    finish_reason: FinishReason | None = None
    """Why it ended."""
    kept: KeptTokens | None = None
    """What its tokens were drawn from, where that is recorded and was less than the whole vocabulary."""
    routed_experts: np.ndarray | None = None
    """[S + T - 1, layers, top-k], where that is recorded: the experts of the S tokens before it, prompt included, and
    of its own but the last, see `cairn.engines.types.types.Completion`."""
    seconds: float = 0.0
    """From the call's admission to its end."""
    cached_tokens: int = 0
    """Of the tokens before it, those that the engine had in its prefix cache."""
    reward: float | None = None
    """Of this turn, where user code knows one: `dataclasses.replace(segment, reward=0.5)`. Not of what the world
    gave: what the world says of a turn is a reward of the segment that was sampled before."""

    @classmethod
    def given(cls, ids: Sequence[int] | np.ndarray) -> "Segment":
        """Tokens that the world gave."""
        return cls(np.asarray(ids, np.int32), np.zeros(len(ids), np.uint8))

    @classmethod
    def sampled(cls, completion: Completion, call: str, seed: int) -> "Segment":
        """What a call of `ctx.sample` sampled with a seed."""
        return cls(
            completion.response_ids,
            np.ones(len(completion.response_ids), np.uint8),
            call,
            completion.log_probs,
            completion.weight_versions,
            seed,
            completion.finish_reason,
            completion.kept,
            completion.routed_experts,
            completion.seconds,
            completion.cached_tokens,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def then(self, rest: "Segment") -> "Segment":
        """This part of a call's tokens and the rest of them, sampled later."""
        return replace(
            rest,
            ids=np.concatenate([self.ids, rest.ids]),
            loss_mask=np.concatenate([self.loss_mask, rest.loss_mask]),
            **of_both(self, rest),
        )

    def until(self, tokens: int) -> "Segment":
        """What it would be if its call had been aborted after so many tokens, fewer than it has."""
        assert self.log_probs is not None
        assert self.weight_versions is not None
        routes = self.routed_experts
        return replace(
            self,
            ids=self.ids[:tokens],
            loss_mask=self.loss_mask[:tokens],
            log_probs=self.log_probs[:tokens],
            weight_versions=self.weight_versions[:tokens],
            finish_reason=FinishReason.ABORT,
            kept=None if self.kept is None else self.kept.at(np.arange(tokens)),
            routed_experts=None if routes is None else routes[: len(routes) - len(self) + tokens],
        )


@dataclass(frozen=True)
class Trajectory:
    """The response to a prompt: T tokens of its segments, one after the other."""

    segments: Sequence[Segment]
    prompt_ids: Sequence[int] | np.ndarray | None = None
    """Its own prompt, where an agent puts the question in words of its own; None: the sample's."""
    retold: int = 0
    """Of its tokens that the policy sampled, those that a later prompt of the sample tells in other tokens."""
    reward: float | None = None
    """Of all of it, where user code knows one; None: the sum of those of its segments, or nothing where they have
    none."""
    role: str | None = None
    """Who acted, where several do: its reward is compared with those of the same role."""
    truncated: bool = False
    """It was cut off before its end: the sample then counts as truncated, however its last answer ended."""

    @property
    def response_ids(self) -> np.ndarray:
        """[T] int32."""
        return _joined([segment.ids for segment in self.segments], np.int32)

    @property
    def loss_mask(self) -> np.ndarray:
        """[T] uint8."""
        return _joined([segment.loss_mask for segment in self.segments], np.uint8)

    @property
    def log_probs(self) -> np.ndarray:
        """[T] float32: 0 where the world gave the token."""
        parts = [np.zeros(len(s), np.float32) if s.log_probs is None else s.log_probs for s in self.segments]
        return _joined(parts, np.float32)

    @property
    def weight_versions(self) -> np.ndarray:
        """[T] int32: of a token that the world gave, the version of the sampled token before it, or else after it."""
        parts: list[np.ndarray] = []
        last = next((int(s.weight_versions[0]) for s in self.segments if s.weight_versions is not None and len(s)), 0)
        for segment in self.segments:
            versions = segment.weight_versions
            parts.append(np.full(len(segment), last, np.int32) if versions is None else versions)
            last = int(parts[-1][-1]) if len(segment) else last
        return _joined(parts, np.int32)

    @property
    def kept(self) -> KeptTokens:
        """Of all T tokens."""
        return sum((KeptTokens.or_whole(one.kept, len(one)) for one in self.segments), KeptTokens.whole(0))

    def routed_experts(self, prompt: int) -> np.ndarray | None:
        """[prompt + T - 1, layers, top-k] of all tokens but the last; None where they are not recorded. Each token has
        those with which it was read first, under the weights that sampled what follows it. Of tokens that the world
        gave last, and nothing was sampled after, nobody has read any: theirs repeat the last ones.

        Args:
            prompt: tokens of the prompt.
        """
        known = first_read([segment.routed_experts for segment in self.segments])
        if known is None:
            return None
        unread = prompt + sum(map(len, self.segments)) - 1 - len(known)
        return np.concatenate([known, np.repeat(known[-1:], unread, axis=0)]) if unread else known

    @property
    def seconds(self) -> float:
        """That engines took for it."""
        return sum(segment.seconds for segment in self.segments)

    @property
    def cached_tokens(self) -> int:
        """Of all its calls."""
        return sum(segment.cached_tokens for segment in self.segments)


@dataclass(frozen=True)
class Origin:
    """Who wants a sample."""

    run: str
    """A name of the run that no other run has, nor had."""
    iteration: int
    scope: str = ""
    """What tells the sample from others of the run with its key: those of an evaluation."""
    attempt: str = ""
    """At the step that it is of."""
    created_at: float = 0.0
    """When the run was created, in Unix seconds."""


@dataclass(frozen=True)
class SampleRequest:
    """One sample that is wanted."""

    group_id: int
    index: int
    """Among the samples of its group, from 0."""
    prompt_ids: Sequence[int]
    seed: int
    """64 bits: every random draw of it comes from them."""
    begun: Segment | None = None
    """What its first call had sampled after the prompt when it was aborted: it goes on after that."""
    cut_at: int | None = None
    """Response tokens of its first call, more than it has begun with, after which it is cut off unless it has ended: it
    is given back as if it had been aborted there. None has no such bound."""
    prompt: str = ""
    """As text, chat template and special tokens included."""
    label: str | None = None
    """The expected answer, as the data row has it."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Of the data row; empty where it has none."""
    images: tuple[Image, ...] = ()
    """Of the prompt, in the order of their placeholders."""
    recorded: "tuple[CallRecord, ...]" = ()
    """What its code was given before, here or in another process: it is given that again."""
    resampled: frozenset[str] = frozenset()
    """Of it, the calls of the policy that are made again, as where they are to be held against what comes out now."""
    origin: Origin | None = None
    """None where nobody else can come to generate it."""

    @property
    def key(self) -> SampleKey:
        """Names it in its run."""
        return self.group_id, self.index


@dataclass(frozen=True)
class GeneratedSample:
    """What became of a sample."""

    group_id: int
    index: int
    trajectory: Trajectory
    """Where it has several, the segments of all, one trajectory after the other."""
    finish_reason: FinishReason
    """Of the last segment that was sampled. ABORT: the sample was given up, and the trajectory holds what its first
    call has; ERROR: it failed."""
    error: str | None = None
    """Why it failed; None where it did not."""
    lengths: tuple[int, ...] | None = None
    """Where it has several trajectories, or one with a prompt of its own, how many of the tokens each has."""
    prompts: tuple[np.ndarray | None, ...] | None = None
    """Where a trajectory has a prompt of its own, that of each, [P] int32; None for those after the sample's."""
    rewards: tuple[float | None, ...] | None = None
    """Where user code gave a trajectory a reward, or a segment of it, that of each."""
    roles: tuple[str | None, ...] | None = None
    """Where a trajectory has a role, that of each."""
    retold: int = 0
    """Of its sampled tokens, those that a later prompt tells in other tokens."""

    @property
    def key(self) -> SampleKey:
        """Names it in its run."""
        return self.group_id, self.index

    @property
    def trajectories(self) -> list[Trajectory]:
        """In order, each without segments of no token where it is one of several."""
        none = (None,) * len(self.lengths or (0,))
        rewards, roles = self.rewards or none, self.roles or none
        if self.lengths is None:
            return [replace(self.trajectory, reward=rewards[0], role=roles[0])]
        segments = [segment for segment in self.trajectory.segments if len(segment)]
        ends = np.cumsum([len(segment) for segment in segments])
        cuts = np.searchsorted(ends, np.cumsum(self.lengths)) + 1
        spans = zip(pairwise((0, *cuts.tolist())), self.prompts or none, rewards, roles, strict=True)
        return [
            Trajectory(segments[start:end], prompt, reward=reward, role=role)
            for (start, end), prompt, reward, role in spans
        ]

    @classmethod
    def failed(cls, request: SampleRequest, error: str) -> "GeneratedSample":
        """One without a token."""
        return cls(*request.key, Trajectory(()), FinishReason.ERROR, error)

    @classmethod
    def aborted(cls, request: SampleRequest) -> "GeneratedSample":
        """One that got no further than it had."""
        begun = () if request.begun is None else (request.begun,)
        return cls(*request.key, Trajectory(begun), FinishReason.ABORT)


def call_seed(seed: int, call: str) -> int:
    """64-bit seed of a call of a sample that has this seed: the first call has the sample's own."""
    if call == FIRST_CALL:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{call}".encode(), digest_size=8).digest(), "little")


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype), *parts])


# What a sample's code was given: one record for each of its calls, which is given again where the code runs again.
#
# Plain values, as they go from the process of user code to whoever makes them durable.


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
    """Its id within the sample: see `cairn.engines.agents.episodes.recorder`."""
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
    """The same of a tool, in a word: `cairn.engines.agents.tools.errors.Reason`."""
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
