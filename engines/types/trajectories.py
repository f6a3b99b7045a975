"""Requests, results and records of samples, as `async def generate(ctx, sample)` uses them.

All are plain values: numpy arrays and numbers.

A trajectory begins after the sample's prompt, or after a prompt of its own. Its segments, in order, are tokens that the
policy sampled and tokens of the environment (the result of a tool, the next question), which are never trained on.
Input and output are token ids: text is never tokenized again. A sample may have several trajectories, for example where
an agent continues with a part of its context, or delegates work to another. They are graded together, and trained on as
separate sequences.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

from cairn.engines.types.images import Image
from cairn.engines.types.types import Completion, FinishReason, SamplingSupport, join_first_values, joined_fields

FIRST_CALL = "0"
"""Id of a sample's first call of `ctx.sample`."""
SampleKey = tuple[int, int]
"""(group_id, index in the group)."""


class BadTrajectory(Exception):
    """`generate` returned no valid trajectory of its sample: the code needs a correction, a retry does not help."""


@dataclass(frozen=True)
class Segment:
    """T consecutive tokens of one source."""

    ids: np.ndarray
    """[T] int32: the tokens."""
    loss_mask: np.ndarray
    """[T] uint8: 1 where the token may be trained on. All sampled tokens have 1, unless user code sets 0."""
    call: str | None = None
    """Id of the call of `ctx.sample` that sampled it; None for tokens of the environment, whose fields below are
    empty."""
    log_probs: np.ndarray | None = None
    """[T] float32, see `cairn.engines.types.types.Completion`."""
    weight_versions: np.ndarray | None = None
    """[T] int32: version of the weights that each token was sampled from."""
    seed: int | None = None
    """Seed of all random draws of the call."""
    finish_reason: FinishReason | None = None
    """Why the segment ended."""
    kept: SamplingSupport | None = None
    """Sampling support of its tokens, where it is recorded and smaller than the whole vocabulary."""
    routed_experts: np.ndarray | None = None
    """[S + T - 1, layers, top-k], where recorded: experts of the S tokens before the segment, prompt included, and of
    its own tokens but the last, see `cairn.engines.types.types.Completion`."""
    seconds: float = 0.0
    """Seconds from the engine's acceptance of the call to its end."""
    cached_tokens: int = 0
    """Number of tokens before it that the engine had in its prefix cache."""
    reward: float | None = None
    """Reward of this turn, where user code sets one: `dataclasses.replace(segment, reward=0.5)`. Only sampled segments
    have one: the environment's reward of a turn goes to the segment that was sampled before."""

    @classmethod
    def given(cls, ids: Sequence[int] | np.ndarray) -> "Segment":
        """Return a segment of environment tokens."""
        return cls(np.asarray(ids, np.int32), np.zeros(len(ids), np.uint8))

    @classmethod
    def sampled(cls, completion: Completion, call: str, seed: int) -> "Segment":
        """Return the segment that a call of `ctx.sample` sampled with a seed."""
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
        """Return this part of a call's tokens joined with the rest, which was sampled later."""
        return replace(
            rest,
            ids=np.concatenate([self.ids, rest.ids]),
            loss_mask=np.concatenate([self.loss_mask, rest.loss_mask]),
            **joined_fields(self, rest),
        )

    def until(self, tokens: int) -> "Segment":
        """Return the segment as if its call had been aborted after `tokens` tokens, fewer than it has."""
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
    """The response to a prompt: the T tokens of its segments in order."""

    segments: Sequence[Segment]
    prompt_ids: Sequence[int] | np.ndarray | None = None
    """Its own prompt, where an agent writes one; None: the sample's."""
    retold: int = 0
    """Number of its sampled tokens that a later prompt of the sample repeats as other tokens."""
    reward: float | None = None
    """Reward of the whole trajectory, where user code sets one; None: the sum of its segments' rewards, or no reward
    where they have none."""
    role: str | None = None
    """Role of the agent, where several act: rewards are compared within the same role."""
    truncated: bool = False
    """Whether it was cut off before its end: the sample then counts as truncated, however its last reply ended."""
    info: dict[str, Any] | None = None
    """JSON values for the grader, which finds them in `infos` of the sample, where user code sets some."""

    @property
    def response_ids(self) -> np.ndarray:
        """[T] int32: its tokens."""
        return _joined([segment.ids for segment in self.segments], np.int32)

    @property
    def loss_mask(self) -> np.ndarray:
        """[T] uint8: 1 where the token may be trained on."""
        return _joined([segment.loss_mask for segment in self.segments], np.uint8)

    @property
    def log_probs(self) -> np.ndarray:
        """[T] float32: 0 for environment tokens."""
        parts = [np.zeros(len(s), np.float32) if s.log_probs is None else s.log_probs for s in self.segments]
        return _joined(parts, np.float32)

    @property
    def weight_versions(self) -> np.ndarray:
        """[T] int32: weight versions; an environment token has that of the sampled token before it, or else after
        it."""
        parts: list[np.ndarray] = []
        last = next((int(s.weight_versions[0]) for s in self.segments if s.weight_versions is not None and len(s)), 0)
        for segment in self.segments:
            versions = segment.weight_versions
            parts.append(np.full(len(segment), last, np.int32) if versions is None else versions)
            last = int(parts[-1][-1]) if len(segment) else last
        return _joined(parts, np.int32)

    @property
    def kept(self) -> SamplingSupport:
        """Sampling support of all T tokens."""
        return sum((SamplingSupport.or_whole(one.kept, len(one)) for one in self.segments), SamplingSupport.whole(0))

    def routed_experts(self, prompt: int) -> np.ndarray | None:
        """Return the experts of all tokens but the last, [prompt + T - 1, layers, top-k]; None where they are not
        recorded.

        Each token has the experts of its first forward pass, under the weights that sampled the tokens after it.
        Environment tokens at the end, after which nothing was sampled, have had no forward pass: the last known experts
        are repeated.

        Args:
            prompt: number of prompt tokens.
        """
        known = join_first_values([segment.routed_experts for segment in self.segments])
        if known is None:
            return None
        unread = prompt + sum(map(len, self.segments)) - 1 - len(known)
        return np.concatenate([known, np.repeat(known[-1:], unread, axis=0)]) if unread else known

    @property
    def seconds(self) -> float:
        """Seconds that engines took for it."""
        return sum(segment.seconds for segment in self.segments)

    @property
    def cached_tokens(self) -> int:
        """Cached tokens of all its calls."""
        return sum(segment.cached_tokens for segment in self.segments)


@dataclass(frozen=True)
class Origin:
    """The owner of a sample."""

    run: str
    """Name of the run, unique among all runs, past ones included."""
    iteration: int
    scope: str = ""
    """Scope that separates samples of the run with equal keys: those of an evaluation."""
    attempt: str = ""
    """Attempt at the sample's step."""
    created_at: float = 0.0
    """Creation time of the run in Unix seconds."""


@dataclass(frozen=True)
class SampleRequest:
    """Request for one sample."""

    group_id: int
    index: int
    """Index within its group, from 0."""
    prompt_ids: Sequence[int]
    seed: int
    """64-bit seed of every random draw of the sample."""
    begun: Segment | None = None
    """Tokens that its first call had sampled after the prompt when it was aborted; the call resumes after them."""
    cut_at: int | None = None
    """Maximum response tokens of its first call, more than `begun` has: at this length an unfinished sample is returned
    as if it had been aborted there. None is unlimited."""
    prompt: str = ""
    """The prompt as text, with chat template and special tokens."""
    label: str | None = None
    """The expected answer, from the data row."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metadata of the data row; empty where it has none."""
    images: tuple[Image, ...] = ()
    """Images of the prompt, in the order of their placeholders."""
    recorded: "tuple[CallRecord, ...]" = ()
    """Records of earlier attempts, here or in another process, which are replayed to its code."""
    resampled: frozenset[str] = frozenset()
    """Recorded calls of the policy that are made again, for example to compare them with new results."""
    origin: Origin | None = None
    """Owner of the sample; None where only one process can generate it."""

    @property
    def key(self) -> SampleKey:
        """Identity of the sample in its run."""
        return self.group_id, self.index


@dataclass(frozen=True)
class GeneratedSample:
    """Result of a sample."""

    group_id: int
    index: int
    trajectory: Trajectory
    """Its trajectory; of several trajectories all segments, one trajectory after the other."""
    finish_reason: FinishReason
    """Reason of the last sampled segment. ABORT: the sample was aborted, and the trajectory holds the tokens of its
    first call; ERROR: it failed."""
    error: str | None = None
    """Why it failed; None where it did not."""
    lengths: tuple[int, ...] | None = None
    """Number of tokens of each trajectory, where there are several or one with a prompt of its own."""
    prompts: tuple[np.ndarray | None, ...] | None = None
    """[P] int32: prompt of each trajectory, where one has its own; None for those after the sample's."""
    rewards: tuple[float | None, ...] | None = None
    """Reward of each trajectory, where user code set one for a trajectory or a segment."""
    roles: tuple[str | None, ...] | None = None
    """Role of each trajectory, where one has a role."""
    retold: int = 0
    """Number of its sampled tokens that a later prompt repeats as other tokens."""
    infos: tuple[dict[str, Any] | None, ...] | None = None
    """Values for the grader of each trajectory, where user code set some."""

    @property
    def key(self) -> SampleKey:
        """Identity of the sample in its run."""
        return self.group_id, self.index

    @property
    def tokens(self) -> int:
        """Number of its response tokens."""
        return sum(map(len, self.trajectory.segments))

    @property
    def trajectories(self) -> list[Trajectory]:
        """Its trajectories in order; where there are several, without empty segments."""
        none = (None,) * len(self.lengths or (0,))
        rewards, roles, infos = self.rewards or none, self.roles or none, self.infos or none
        if self.lengths is None:
            return [replace(self.trajectory, reward=rewards[0], role=roles[0], info=infos[0])]
        segments = [segment for segment in self.trajectory.segments if len(segment)]
        ends = np.cumsum([len(segment) for segment in segments])
        cuts = np.searchsorted(ends, np.cumsum(self.lengths)) + 1
        spans = zip(pairwise((0, *cuts.tolist())), self.prompts or none, rewards, roles, infos, strict=True)
        return [
            Trajectory(segments[start:end], prompt, reward=reward, role=role, info=info)
            for (start, end), prompt, reward, role, info in spans
        ]

    @classmethod
    def failed(cls, request: SampleRequest, error: str) -> "GeneratedSample":
        """Return a failed sample without tokens."""
        return cls(*request.key, Trajectory(()), FinishReason.ERROR, error)

    @classmethod
    def aborted(cls, request: SampleRequest) -> "GeneratedSample":
        """Return an aborted sample with the tokens that the request had."""
        begun = () if request.begun is None else (request.begun,)
        return cls(*request.key, Trajectory(begun), FinishReason.ABORT)


def call_seed(seed: int, call: str) -> int:
    """Return the 64-bit seed of a call, from the seed of its sample; the first call has the sample's own."""
    if call == FIRST_CALL:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{call}".encode(), digest_size=8).digest(), "little")


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype), *parts])


# Records of the calls of a sample's code, which are replayed when the code runs again.
#
# Plain values, since they go from the process of user code to the one that makes them durable.


class CallKind(StrEnum):
    """Kind of a call."""

    SAMPLE = "sample"
    """The policy continues tokens: `ctx.sample`."""
    TOOL = "tool"
    """A tool runs: `ctx.call`."""
    JUDGE = "judge"
    """A grader runs: `ctx.judge`."""
    NOW = "now"
    """The clock is read: `ctx.now`."""


@dataclass(frozen=True)
class CallRecord:
    """A call of a sample's code with its response, or the intent to make a call with effects."""

    group_id: int
    index: int
    """Index of the sample in its group."""
    call: str
    """Id of the call within the sample, see `cairn.engines.agents.episodes.recorder`."""
    kind: CallKind
    name: str
    """Name of the tool or the grader; empty for the policy and the clock."""
    arguments_digest: str
    """Digest of the arguments: a call with another digest is a different call."""
    order: int | None = None
    """Position, from 0, in the order in which the sample's code received responses; None for an intent, which has no
    response yet."""
    turn: int = 0
    """Number of replies of the policy that the code had before the call."""
    arguments: str | None = None
    """Arguments as JSON; None for the policy and the clock."""
    result: str | None = None
    """Result as JSON; None where the call failed, and for the policy, whose response is `segment`."""
    error: str | None = None
    """Why it failed; None where it did not."""
    reason: str | None = None
    """Reason of a tool's failure: a value of `cairn.engines.agents.tools.errors.Reason`."""
    segment: Segment | None = None
    """Segment that the policy sampled."""
    given: int = 0
    """Number of input tokens of the policy."""
    started_at: float = 0.0
    """Start of the call in seconds since the epoch."""
    seconds: float = 0.0
    """Seconds until the response."""

    @property
    def key(self) -> SampleKey:
        """Key of its sample."""
        return self.group_id, self.index

    @property
    def description(self) -> str:
        """Description of the call, for messages."""
        what = f"{self.kind} {self.name}".strip()
        shows_arguments = self.arguments and self.kind is not CallKind.SAMPLE  # of the policy it is a digest
        return f"call {self.call} ({what})" + (f" with {self.arguments}" if shows_arguments else "")


NEVER = -1
"""Acknowledged in place of a number: no waiting record will become durable."""


@dataclass(frozen=True)
class Recorded:
    """A batch of new records, in order."""

    number: int
    """Number of the batch in its process."""
    records: list[CallRecord]
    awaited: bool
    """Whether a sample waits for `acknowledge(number)`: until these records, and all before them, are durable."""


def add_records(samples: dict[SampleKey, SampleRequest], records: Iterable[CallRecord]) -> None:
    """Add new records to the requests of their samples, for a later replay."""
    by_sample: dict[SampleKey, list[CallRecord]] = {}
    for record in records:
        by_sample.setdefault(record.key, []).append(record)
    for key in by_sample.keys() & samples.keys():
        samples[key] = replace(samples[key], recorded=(*samples[key].recorded, *by_sample[key]))
