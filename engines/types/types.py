"""The words that engines and tasks exchange. Plain values: numpy arrays and numbers, no engine's own types."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any, Literal, Protocol

import numpy as np

from cairn.engines.types.images import Image

ModelRole = Literal["actor", "ref", "teacher", "critic"]
"""A model of the training engine: the policy that is trained, the reference of the KL divergence, the teacher of
on-policy distillation, or the critic, which is trained beside the policy."""


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """The model emitted an end token, or completed a stop string; it is the response's last token."""
    LENGTH = "length"
    """The response reached its longest allowed length or the end of the context."""
    ABORT = "abort"
    """Generation was stopped on request; the response is a part, perhaps empty, that can be continued."""
    ERROR = "error"
    """Generation failed; there is no response."""


@dataclass(frozen=True)
class KeptTokens:
    """What each of T tokens was drawn from, where the sampler cut the vocabulary down to the most probable tokens.

    The ids themselves, since no threshold or count would give another engine, whose logits differ in rounding, the same
    set."""

    ids: np.ndarray
    """[sum of counts] int32: the token ids that were left, token after token, ascending in each."""
    counts: np.ndarray
    """[T] int32: how many were left; 0 where the whole vocabulary was."""

    @classmethod
    def whole(cls, length: int) -> "KeptTokens":
        """Of tokens that were drawn from the whole vocabulary."""
        return cls(np.zeros(0, np.int32), np.zeros(length, np.int32))

    @classmethod
    def or_whole(cls, kept: "KeptTokens | None", length: int) -> "KeptTokens":
        """These, or where nothing is recorded that many tokens that were drawn from the whole vocabulary."""
        return cls.whole(length) if kept is None else kept

    @classmethod
    def of(cls, sets: Sequence[Sequence[int] | np.ndarray]) -> "KeptTokens":
        """Of the ids that each token was drawn from, in any order; none where that was the whole vocabulary."""
        ids = [np.sort(np.asarray(ids, np.int32)) for ids in sets]
        return cls(np.concatenate([np.zeros(0, np.int32), *ids]), np.array([len(part) for part in ids], np.int32))

    def __len__(self) -> int:
        return len(self.counts)

    def __add__(self, later: "KeptTokens") -> "KeptTokens":
        """Of these tokens and those that follow them."""
        return KeptTokens(np.concatenate([self.ids, later.ids]), np.concatenate([self.counts, later.counts]))

    def at(self, places: np.ndarray) -> "KeptTokens":
        """Of some of the tokens, by their places among the T."""
        counts = self.counts[places]
        starts = (np.cumsum(self.counts) - self.counts)[places]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return KeptTokens(self.ids[np.repeat(starts, counts) + within], counts)

    def first_without(self, tokens: np.ndarray) -> int | None:
        """The first place whose token, of [T], is not among those it was drawn from; None where there is none."""
        rows = np.repeat(np.arange(len(self)), self.counts)
        found = self.counts == 0
        found[rows[self.ids == np.asarray(tokens)[rows]]] = True
        return None if found.all() else int(found.argmin())


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Names as in SGLang's sampling parameters."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    """Ends a response besides the model's own end tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a response whose text, special tokens kept, holds one: the token that completes it is the
    response's last."""
    return_kept: bool = False
    """Report, for each token, the ids that top_p and top_k left to draw from."""
    return_routed_experts: bool = False
    """Report, for each token that the model read, the experts that it chose."""

    @property
    def cuts_vocabulary(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary only."""
        return self.top_p < 1 or self.top_k > 0


RequestId = tuple[int, ...]
"""Names a request among those of its stream. The first number is its group's: requests of a group begin alike, and go
to one server where there are several."""


@dataclass(frozen=True)
class GenerateRequest:
    """One sample: the tokens to go on from, and how. What is drawn depends on these, the seed, the position and the
    weights, and on nothing else. Samples that go on from equal tokens have them computed once."""

    request_id: RequestId
    input_ids: Sequence[int] | np.ndarray
    """The tokens to go on from, a prompt for one."""
    seed: int
    """64 bits."""
    sampling_params: SamplingParams
    position: int = 0
    """Where a sample is continued: how many of the last input tokens it has drawn with this seed before. They count
    towards `max_new_tokens`, and are not returned."""
    images: tuple[Image, ...] = ()
    """What the model sees at the first placeholders among its tokens, in order."""

    def after(self, part: "Completion | None") -> "GenerateRequest":
        """What asks for the rest, where a part of it has been generated."""
        if part is None or not len(part.response_ids):
            return self
        tokens = np.concatenate([np.asarray(self.input_ids, np.int64), part.response_ids])
        return replace(self, input_ids=tokens, position=self.position + len(part.response_ids))


@dataclass(frozen=True)
class Completion:
    """What became of a request, finished or aborted. Tokens that the request gave are left out."""

    request_id: RequestId
    response_ids: np.ndarray
    """[T] int32, generated in this call, the end token included."""
    log_probs: np.ndarray
    """[T] float32: of each response token under the distribution that it was drawn from, softmax(logits / temperature)
    over what top-p and top-k left of the vocabulary; at temperature 0, under softmax(logits). Where what was left was
    not asked for, an engine may give those over the whole vocabulary."""
    weight_versions: np.ndarray
    """[T] int32: of the weights that each token was sampled from."""
    finish_reason: FinishReason
    seconds: float
    """From the request's admission to its end."""
    cached_tokens: int = 0
    """Of the input tokens, those whose keys and values the engine had kept from other requests."""
    kept: KeptTokens | None = None
    """What its T tokens were drawn from, where that was asked for and is less than the whole vocabulary."""
    routed_experts: np.ndarray | None = None
    """[S + T - 1, layers, top-k] uint8 or uint16, where that was asked for: the experts that each mixture of the model
    chose for the S tokens that the request gave and for those generated, but the last, which it has not read."""
    error: str | None = None
    """Why generation failed; None where it did not."""

    @classmethod
    def empty(cls, request_id: RequestId, finish_reason: FinishReason, error: str | None = None) -> "Completion":
        """One without a token."""
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
        """This part of a response and the rest of it, generated later."""
        return replace(rest, response_ids=np.concatenate([self.response_ids, rest.response_ids]), **of_both(self, rest))


class Sampled(Protocol):
    """What is known of T tokens that were sampled: a `Completion`, a segment. See `Completion` for the fields."""

    @property
    def log_probs(self) -> np.ndarray | None: ...
    @property
    def weight_versions(self) -> np.ndarray | None: ...
    @property
    def kept(self) -> KeptTokens | None: ...
    @property
    def routed_experts(self) -> np.ndarray | None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def cached_tokens(self) -> int: ...


def of_both(part: Sampled, rest: Sampled) -> dict[str, Any]:
    """What is known of the tokens of a part and of the rest, which was sampled later, by its fields."""
    assert part.log_probs is not None
    assert part.weight_versions is not None
    assert rest.log_probs is not None
    assert rest.weight_versions is not None
    kept = None
    if part.kept is not None or rest.kept is not None:
        kept = KeptTokens.or_whole(part.kept, len(part.log_probs)) + KeptTokens.or_whole(rest.kept, len(rest.log_probs))
    return {
        "log_probs": np.concatenate([part.log_probs, rest.log_probs]),
        "weight_versions": np.concatenate([part.weight_versions, rest.weight_versions]),
        "kept": kept,
        "routed_experts": first_read([part.routed_experts, rest.routed_experts]),
        "seconds": part.seconds + rest.seconds,
        "cached_tokens": part.cached_tokens + rest.cached_tokens,
    }


def first_read(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Of what calls, one after the other, say of all tokens up to theirs: of each token what the first call says."""
    found: list[np.ndarray] = []
    for part in parts:
        if part is not None:
            found.append(part[sum(map(len, found)) :])
    return None if not found else found[0] if len(found) == 1 else np.concatenate(found)


@dataclass(frozen=True)
class TrainBatch:
    """Samples to score or to train on, in the order in which the optimizer steps consume them.

    Sample i has P_i prompt and R_i response tokens. Optional fields are None when the algorithm does not use them.
    """

    input_ids: list[np.ndarray]
    """[P_i + R_i] int32: prompt, then response."""
    response_lengths: list[int]
    """R_i."""
    loss_mask: list[np.ndarray]
    """[R_i] uint8: 1 where the token is trained on."""
    divisor_mask: list[np.ndarray] | None = None
    """[R_i] uint8: 1 where the token counts in what the loss is divided by: those of `loss_mask`, and those that were
    taken out of it for their age or by a filter, so that the others weigh what they did. None where they are the
    same."""
    advantages: list[np.ndarray] | None = None
    """[R_i] float32."""
    old_log_probs: list[np.ndarray] | None = None
    """[R_i] float32 of the policy that the ratio is taken against; None takes the current policy's own, detached."""
    rollout_log_probs: list[np.ndarray] | None = None
    """[R_i] float32 of the rollout engine, for truncated importance sampling and the mismatch metric."""
    ref_log_probs: list[np.ndarray] | None = None
    """[R_i] float32 of the reference model."""
    teacher_log_probs: list[np.ndarray] | None = None
    """[R_i] float32 of the teacher."""
    teacher_top_log_probs: list[np.ndarray] | None = None
    """[R_i, k] float32 of the teacher's k most probable tokens, see `cairn.engines.training.log_probs` …"""
    teacher_top_ids: list[np.ndarray] | None = None
    """[R_i, k] int32: … and which they are; there where the log-probs are."""
    values: list[np.ndarray] | None = None
    """[R_i] float32 of the critic before the update, which its new values are held to."""
    returns: list[np.ndarray] | None = None
    """[R_i] float32: what the critic learns."""
    groups: list[int] | None = None
    """The group of each sample; None where each is one by itself."""
    samples: list[int] | None = None
    """Where a sample has several trajectories, each of them is an entry of the fields above, in order, and this says
    which sample it is of, from 0. None where each entry is a sample by itself."""
    kept: list[KeptTokens] | None = None
    """Of R_i tokens: what each was drawn from. Log-probs and entropies are those of the softmax over it, under every
    model. None where all were drawn from the whole vocabulary."""
    routed_experts: list[np.ndarray | None] | None = None
    """[P_i + R_i - 1, layers, top-k] uint8 or uint16: the experts that each mixture of the rollout engine's model chose
    for each token but the last, which the actor is given in the place of its own choice, in its scores and its updates;
    None for samples, or all of them, for which it chooses by itself."""
    images: list[tuple[Image, ...]] | None = None
    """Of each prompt, in the order of their placeholders; None where none has any."""
    picked: list[np.ndarray] | None = None
    """[R_i] bool, of an optimizer step, for the engine's own use: the tokens that its loss treats apart
    (`cairn.configs.kinds.Declaration.picks`)."""
    mean_correction: float | None = None
    """Of an optimizer step, for the engine's own use: by which the weights that correct for off-policy tokens are
    divided, see `cairn.engines.training.exactly_once`."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels as one array a field: thousands of small ones take tens of milliseconds."""
        values = [getattr(self, field.name) for field in fields(self)]
        packed = {id(value): _Packed.of(value) for value in values}  # a list that is two fields is one again
        return _travelled_batch, ([packed[id(value)] for value in values],)

    @property
    def sample_of(self) -> Sequence[int]:
        """Which sample each entry is of, from 0."""
        return range(len(self)) if self.samples is None else self.samples


@dataclass(frozen=True)
class _Packed:
    """A list of vectors of one type, or of rows of one length, as one."""

    values: np.ndarray
    lengths: list[int]

    @classmethod
    def of(cls, value: Any) -> Any:
        """Anything else stays as it is."""
        if not isinstance(value, list) or not all(
            isinstance(item, np.ndarray) and item.ndim in (1, 2) for item in value
        ):
            return value
        if len({(item.dtype, item.shape[1:]) for item in value}) != 1:
            return value
        return cls(np.concatenate(value), list(map(len, value)))

    def unpacked(self) -> list[np.ndarray]:
        """The list."""
        ends = accumulate(self.lengths)
        return [self.values[end - length : end] for length, end in zip(self.lengths, ends, strict=True)]


def _travelled_batch(values: Sequence[Any]) -> TrainBatch:
    unpacked: dict[int, Any] = {
        id(value): value.unpacked() if isinstance(value, _Packed) else value for value in values
    }
    return TrainBatch(*(unpacked[id(value)] for value in values))


@dataclass(frozen=True)
class Position:
    """Where a training engine stands: what makes an update happen exactly once."""

    weight_version: int
    """Optimizer steps since the run's initial weights."""
    state_digest: str
    """Of parameters and optimizer state, equal on every layout of ranks. One digest for every role that is trained:
    an engine with a critic beside the actor covers both, so that they move, are saved and are discarded together."""
    last_input_digest: str | None = None
    """Digest of the input of the last `train` call that ended, None after a load."""
    last_result: "TrainResult | None" = None


@dataclass(frozen=True)
class Publication:
    """Weights laid where rollout engines fetch them."""

    version: int
    digest: str
    """`cairn.engines.weights.checksum.weights_checksum` of them, in the number format of the rollout engines."""


@dataclass(frozen=True)
class TrainResult:
    """What a `train` call did."""

    weight_version: int
    state_digest: str
    metrics: dict[str, float] = field(default_factory=dict)
    """Means over the optimizer steps, under slime's names (`loss`, `pg_loss`, `pg_clipfrac`, `ppo_kl`, `grad_norm`,
    …)."""
    seconds: float = 0.0
    tokens: int = 0


# How requests are given to an engine that generates for several askers at a time.


class Stream(Protocol):
    """The requests of one asker, and an iterator over what becomes of them, as it comes: in lists of what ended
    together. It ends when everything has, and goes on where more is asked.

    One thread iterates; the other methods may be called from any.

    Raises, in `__next__`:
        GenerationFailed: the weights give no finite logits for a sample, or the engine, alive, failed on one.
        RequestRefused: the engine found out late that it cannot serve some; the others come with what follows.
        EngineError: the engine is not to be reached.
    """

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Generate a sample for each request, beside whatever the engine is at work on.

        Raises:
            RequestRefused: some cannot be served; nothing of the call is generated.
            EngineError: the weights are being updated or their memory is released.
        """

    def __iter__(self) -> "Stream": ...

    def __next__(self) -> list[Completion]: ...

    def abort(self) -> None:
        """End all requests soon, and those at once that come later: each gives what it has of its sample, with finish
        reason ABORT."""

    def close(self) -> None:
        """Give up what has not ended; the engine is then at work on none of it."""
