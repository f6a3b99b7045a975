"""Types that engines and tasks exchange. Plain values: numpy arrays and numbers, no types of a particular engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any, Literal, Protocol

import numpy as np

from cairn.engines.types.images import Image

ModelRole = Literal["actor", "ref", "teacher", "critic"]
"""Role of a model in the training engine: the policy that is trained, the reference of the KL divergence, the teacher
of on-policy distillation, or the critic, which is trained together with the policy."""


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """The model sampled an end token, or completed a stop string; it is the response's last token."""
    LENGTH = "length"
    """The response reached its maximum length or the end of the context."""
    ABORT = "abort"
    """Generation was aborted on request; the response is partial, perhaps empty, and can be resumed."""
    ERROR = "error"
    """Generation failed; there is no response."""


@dataclass(frozen=True)
class SamplingSupport:
    """Sampling support of T tokens: the tokens that each was drawn from, where top-p or top-k cut the vocabulary.

    It holds the ids themselves. A threshold or a count would give another set in an engine whose logits differ by
    rounding."""

    ids: np.ndarray
    """[sum of counts] int32: ids of the supports, token after token, ascending in each."""
    counts: np.ndarray
    """[T] int32: size of each support; 0 for the whole vocabulary."""

    @classmethod
    def whole(cls, length: int) -> "SamplingSupport":
        """Return the supports of tokens that were drawn from the whole vocabulary."""
        return cls(np.zeros(0, np.int32), np.zeros(length, np.int32))

    @classmethod
    def or_whole(cls, kept: "SamplingSupport | None", length: int) -> "SamplingSupport":
        """Return `kept`, or where it is None the supports of `length` tokens drawn from the whole vocabulary."""
        return cls.whole(length) if kept is None else kept

    @classmethod
    def of(cls, sets: Sequence[Sequence[int] | np.ndarray]) -> "SamplingSupport":
        """Return the supports for a set of ids per token, in any order; an empty set is the whole vocabulary."""
        ids = [np.sort(np.asarray(ids, np.int32)) for ids in sets]
        return cls(np.concatenate([np.zeros(0, np.int32), *ids]), np.array([len(part) for part in ids], np.int32))

    def __len__(self) -> int:
        return len(self.counts)

    def __add__(self, later: "SamplingSupport") -> "SamplingSupport":
        """Return the supports of these tokens and of those that follow them."""
        return SamplingSupport(np.concatenate([self.ids, later.ids]), np.concatenate([self.counts, later.counts]))

    def at(self, places: np.ndarray) -> "SamplingSupport":
        """Return the supports of some of the T tokens, by their indices."""
        counts = self.counts[places]
        starts = (np.cumsum(self.counts) - self.counts)[places]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return SamplingSupport(self.ids[np.repeat(starts, counts) + within], counts)

    def first_without(self, tokens: np.ndarray) -> int | None:
        """Return the index of the first of T tokens that is not in its support; None where all are."""
        rows = np.repeat(np.arange(len(self)), self.counts)
        supported = self.counts == 0
        supported[rows[self.ids == np.asarray(tokens)[rows]]] = True
        return None if supported.all() else int(supported.argmin())


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, with the names of SGLang's."""

    max_new_tokens: int
    temperature: float = 1.0
    """Temperature; 0 takes the most probable token."""
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, in addition to the model's end tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a response when its text, special tokens included, contains one; the token that completes the
    string is the response's last."""
    return_sampling_support: bool = False
    """Whether to return the sampling support of each token under top_p and top_k."""
    return_routed_experts: bool = False
    """Whether to return the experts of each token that the model read."""

    @property
    def cuts_vocabulary(self) -> bool:
        """Whether top-p or top-k cuts the vocabulary."""
        return self.top_p < 1 or self.top_k > 0


RequestId = tuple[int, ...]
"""Id of a request in its stream. The first number is its group's: requests of a group share a prefix, and go to the
same server where there are several."""


@dataclass(frozen=True)
class GenerateRequest:
    """Request to continue tokens. The result depends only on these, the sampling parameters, the seed, the position and
    the weights. Requests with equal tokens share their prefill."""

    request_id: RequestId
    input_ids: Sequence[int] | np.ndarray
    """Tokens to continue, for example a prompt."""
    seed: int
    """64-bit seed."""
    sampling_params: SamplingParams
    position: int = 0
    """Number of last input tokens that an earlier request of the sample drew with this seed, where it is resumed. They
    count towards `max_new_tokens`, and are not returned."""
    images: tuple[Image, ...] = ()
    """Images of the first placeholders among its tokens, in order."""

    def after(self, part: "Completion | None") -> "GenerateRequest":
        """Return the request for the rest, where a part has been generated."""
        if part is None or not len(part.response_ids):
            return self
        tokens = np.concatenate([np.asarray(self.input_ids, np.int64), part.response_ids])
        return replace(self, input_ids=tokens, position=self.position + len(part.response_ids))


@dataclass(frozen=True)
class Completion:
    """Result of a request, finished or aborted, without the request's own tokens."""

    request_id: RequestId
    response_ids: np.ndarray
    """[T] int32: generated tokens, the end token included."""
    log_probs: np.ndarray
    """[T] float32: log-prob of each response token under the distribution that it was drawn from. This is
    softmax(logits / temperature) over its sampling support; at temperature 0, softmax(logits). Where the support is not
    requested, an engine may return log-probs over the whole vocabulary."""
    weight_versions: np.ndarray
    """[T] int32: version of the weights that each token was sampled from."""
    finish_reason: FinishReason
    seconds: float
    """Seconds from the acceptance of the request to its end."""
    cached_tokens: int = 0
    """Number of input tokens whose keys and values were in the engine's prefix cache."""
    kept: SamplingSupport | None = None
    """Sampling support of its T tokens, where it is requested and smaller than the whole vocabulary."""
    routed_experts: np.ndarray | None = None
    """[S + T - 1, layers, top-k] uint8 or uint16, where requested: the experts that each MoE layer chose for the S
    input tokens and for the generated ones but the last, which the model has not read."""
    error: str | None = None
    """Why generation failed; None where it did not."""

    @classmethod
    def empty(cls, request_id: RequestId, finish_reason: FinishReason, error: str | None = None) -> "Completion":
        """Return a completion without tokens."""
        return cls(
            request_id=request_id,
            response_ids=np.zeros(0, np.int32),
            log_probs=np.zeros(0, np.float32),
            weight_versions=np.zeros(0, np.int32),
            finish_reason=finish_reason,
            seconds=0.0,
            error=error,
        )

    def then(self, rest: "Completion") -> "Completion":
        """Return this part of a response joined with the rest, which was generated later."""
        return replace(
            rest, response_ids=np.concatenate([self.response_ids, rest.response_ids]), **joined_fields(self, rest)
        )


class Sampled(Protocol):
    """Common fields of T sampled tokens, in a `Completion` or a segment; `Completion` describes them."""

    @property
    def log_probs(self) -> np.ndarray | None: ...
    @property
    def weight_versions(self) -> np.ndarray | None: ...
    @property
    def kept(self) -> SamplingSupport | None: ...
    @property
    def routed_experts(self) -> np.ndarray | None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def cached_tokens(self) -> int: ...


def joined_fields(part: Sampled, rest: Sampled) -> dict[str, Any]:
    """Return the common fields of a part joined with the rest, which was sampled later, by name."""
    assert part.log_probs is not None
    assert part.weight_versions is not None
    assert rest.log_probs is not None
    assert rest.weight_versions is not None
    kept = None
    if part.kept is not None or rest.kept is not None:
        kept = SamplingSupport.or_whole(part.kept, len(part.log_probs)) + SamplingSupport.or_whole(
            rest.kept, len(rest.log_probs)
        )
    return {
        "log_probs": np.concatenate([part.log_probs, rest.log_probs]),
        "weight_versions": np.concatenate([part.weight_versions, rest.weight_versions]),
        "kept": kept,
        "routed_experts": join_first_values([part.routed_experts, rest.routed_experts]),
        "seconds": part.seconds + rest.seconds,
        "cached_tokens": part.cached_tokens + rest.cached_tokens,
    }


def join_first_values(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Join arrays of consecutive calls, each over all tokens up to its own: every token keeps its first value."""
    joined: list[np.ndarray] = []
    for part in parts:
        if part is not None:
            joined.append(part[sum(map(len, joined)) :])
    return None if not joined else joined[0] if len(joined) == 1 else np.concatenate(joined)


@dataclass(frozen=True)
class TrainBatch:
    """Samples to score or to train on, in the order in which the optimizer steps consume them.

    Sample i has P_i prompt and R_i response tokens. Optional fields are None when the algorithm does not use them.
    """

    input_ids: list[np.ndarray]
    """[P_i + R_i] int32: prompt, then response."""
    response_lengths: list[int]
    """Number of response tokens R_i."""
    loss_mask: list[np.ndarray]
    """[R_i] uint8: 1 where the token is trained on."""
    divisor_mask: list[np.ndarray] | None = None
    """[R_i] uint8: 1 where the token counts in the divisor of the loss: tokens of `loss_mask`, and those that were
    masked for their age or by a filter, so that the weight of the others does not change. None where both masks are the
    same."""
    advantages: list[np.ndarray] | None = None
    """[R_i] float32: advantages."""
    old_log_probs: list[np.ndarray] | None = None
    """[R_i] float32: log-probs in the denominator of the ratio; None takes the current policy's own, detached."""
    rollout_log_probs: list[np.ndarray] | None = None
    """[R_i] float32: log-probs of the rollout engine, for truncated importance sampling and the mismatch metric."""
    ref_log_probs: list[np.ndarray] | None = None
    """[R_i] float32: log-probs of the reference model."""
    teacher_log_probs: list[np.ndarray] | None = None
    """[R_i] float32: log-probs of the teacher."""
    teacher_top_log_probs: list[np.ndarray] | None = None
    """[R_i, k] float32: log-probs of the teacher's k most probable tokens, see `cairn.engines.training.log_probs`."""
    teacher_top_ids: list[np.ndarray] | None = None
    """[R_i, k] int32: ids of these k tokens; set together with `teacher_top_log_probs`."""
    values: list[np.ndarray] | None = None
    """[R_i] float32: values of the critic before the update, around which its new values are clipped."""
    returns: list[np.ndarray] | None = None
    """[R_i] float32: targets of the critic."""
    groups: list[int] | None = None
    """Group of each sample; None where each is a group of its own."""
    samples: list[int] | None = None
    """Index, from 0, of the sample of each entry, where a sample has several trajectories: each trajectory is then an
    entry of the fields above, in order. None where each entry is a sample."""
    kept: list[SamplingSupport] | None = None
    """Sampling supports of R_i tokens. Log-probs and entropies are those of the softmax over the support, under every
    model. None where all tokens were drawn from the whole vocabulary."""
    routed_experts: list[np.ndarray | None] | None = None
    """[P_i + R_i - 1, layers, top-k] uint8 or uint16: the experts that each MoE layer of the rollout engine's model
    chose for each token but the last. The actor uses them instead of its own choice, in scores and updates. None for
    samples, or for all, where it chooses itself."""
    images: list[tuple[Image, ...]] | None = None
    """Images of each prompt, in the order of their placeholders; None where no prompt has any."""
    routed_choices: list[int] | None = None
    """Number of choices in `routed_experts` of each entry, where this rank does not hold those of all."""
    picked: list[np.ndarray] | None = None
    """[R_i] bool, internal to the engine and set in an optimizer step: tokens that its loss treats separately
    (`cairn.configs.kinds.Declaration.picks`)."""
    mean_correction: float | None = None
    """Divisor of the weights that correct for off-policy tokens, internal to the engine and set in an optimizer step;
    see `cairn.engines.training.exactly_once`."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle each field as one array: thousands of small arrays take tens of milliseconds."""
        values = [getattr(self, field.name) for field in fields(self)]
        packed = {id(value): _Packed.of(value) for value in values}  # a list that is two fields is one again
        return _unpacked_batch, ([packed[id(value)] for value in values],)

    @property
    def sample_of(self) -> Sequence[int]:
        """Index of the sample of each entry, from 0."""
        return range(len(self)) if self.samples is None else self.samples


@dataclass(frozen=True)
class _Packed:
    """A list of vectors of one type, or of rows of one length, as one array."""

    values: np.ndarray
    lengths: list[int]

    @classmethod
    def of(cls, value: Any) -> Any:
        """Pack a list of arrays; return any other value unchanged."""
        if not isinstance(value, list) or not all(
            isinstance(item, np.ndarray) and item.ndim in (1, 2) for item in value
        ):
            return value
        if len({(item.dtype, item.shape[1:]) for item in value}) != 1:
            return value
        return cls(np.concatenate(value), list(map(len, value)))

    def unpacked(self) -> list[np.ndarray]:
        """Return the list of arrays."""
        ends = accumulate(self.lengths)
        return [self.values[end - length : end] for length, end in zip(self.lengths, ends, strict=True)]


def _unpacked_batch(values: Sequence[Any]) -> TrainBatch:
    unpacked: dict[int, Any] = {
        id(value): value.unpacked() if isinstance(value, _Packed) else value for value in values
    }
    return TrainBatch(*(unpacked[id(value)] for value in values))


@dataclass(frozen=True)
class Position:
    """State of a training engine, by which an update is applied exactly once."""

    weight_version: int
    """Number of optimizer steps since the run's initial weights."""
    state_digest: str
    """Digest of parameters and optimizer state, equal on every layout of ranks. One digest covers all roles that are
    trained: actor and critic advance, are saved and are discarded together."""
    last_input_digest: str | None = None
    """Digest of the input of the last `train` call that ended; None after a load."""
    last_result: "TrainResult | None" = None


@dataclass(frozen=True)
class Publication:
    """Weights stored where rollout engines fetch them."""

    version: int
    digest: str
    """`weights_checksum` (`cairn.engines.weights.fingerprint`) of the weights, in the number format of the rollout
    engines."""


@dataclass(frozen=True)
class TrainResult:
    """Result of a `train` call."""

    weight_version: int
    state_digest: str
    metrics: dict[str, float] = field(default_factory=dict)
    """Means over the optimizer steps, with slime's names (`loss`, `pg_loss`, `pg_clipfrac`, `ppo_kl`, `grad_norm`,
    …)."""
    seconds: float = 0.0
    tokens: int = 0
    lengths: tuple[int, ...] = ()
    """Tokens of each sequence of the batch, on rank 0."""


# Requests to an engine that generates for several callers at a time.


class Stream(Protocol):
    """The requests of one caller, and an iterator over their results, in lists of what ended together.

    The iterator ends when every request has ended, and continues when more are submitted. One thread iterates; the
    other methods are thread-safe.

    Raises, in `__next__`:
        GenerationFailed: the weights give no finite logits for a sample, or the engine, alive, failed on one.
        RequestRefused: the engine determined late that it cannot serve some requests; the others' results follow.
        EngineError: the engine is unreachable.
    """

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Add requests to the engine's running batch, one sample each.

        Raises:
            RequestRefused: some cannot be served; nothing of the call is generated.
            EngineError: the weights are being updated or their memory is released.
        """

    def __iter__(self) -> "Stream": ...

    def __next__(self) -> list[Completion]: ...

    def abort(self) -> None:
        """End all requests soon, and later ones at once: each returns its partial sample with finish reason ABORT."""

    def close(self) -> None:
        """Give up unfinished requests; the engine then works on none of them."""
