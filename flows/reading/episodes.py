"""Episodes turn by turn: environment input, responses of the policy, and the calls in between.

Tokens are those of the committed trajectory. Where the sample's code was recorded (`calls.parquet`), its calls of tools
and graders appear after the response that they followed, and responses have their start time and their number of cached
tokens. A call that ran concurrently with others follows the newest response of its own task, of the tasks that started
this task, or of those that it has started.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from cairn.configs.loader import from_manifest
from cairn.engines.types.trajectories import FIRST_CALL
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import (
    SEQUENCES,
    TRAJECTORIES,
    TRAJECTORY_PROMPTS,
    TRAJECTORY_REWARDS,
    TRAJECTORY_ROLES,
    TURN_REWARDS,
)
from cairn.storage.ledger.snapshots import read_recorded_table, sample_rows
from cairn.storage.logs.call_log import calls_of
from cairn.storage.records import Record
from cairn.storage.store.errors import Damaged, Retired

# Texts of tokens, from the run's own tokenizer, if it is still where the run had it.


_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 8
"""Number of tokens of one character at most, in any tokenizer with byte fallback."""


class Texts:
    """Converts each token of a response to its text; the concatenation is the text of the response."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a tokenizer of Transformers."""
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}

    def __call__(self, ids: np.ndarray) -> list[str]:
        """Return a text for each token; "" for a token with an incomplete character that a later token completes."""
        listed = ids.tolist()
        for one in set(listed) - self._alone.keys():
            self._alone[one] = self._decode([one])
        texts = [self._alone[one] for one in listed]
        return texts if "".join(texts) == self._decode(listed) else self._with_context(listed)

    def are_of(self, ids: np.ndarray, response: str) -> bool:
        """Whether this tokenizer decodes the ids to the response; the folder may contain another model by now."""
        return self._decode(ids.tolist(), skip_special_tokens=True) == response

    def whole(self, ids: np.ndarray) -> str:
        """Return the text of consecutive tokens, special tokens included."""
        return self._decode(ids.tolist())

    def _with_context(self, ids: Sequence[int]) -> list[str]:
        """Return what `__call__` returns, for tokens whose texts depend on earlier ones."""
        texts, begin, shown = [], 0, ""
        for end in range(1, len(ids) + 1):
            text = self._decode(ids[begin:end])
            is_part = text.endswith(_REPLACEMENT) and end < len(ids) and end - begin < 2 * _LONGEST_CHARACTER
            texts.append("" if is_part else text[len(shown) :])
            if not is_part:
                # One previous token as context is enough to decode the next token as in the whole sequence.
                begin, shown = end - 1, self._decode(ids[end - 1 : end])
        return texts

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def run_texts(ledger: Ledger, tried: Iterable[tuple[np.ndarray, str]] = ()) -> Texts | None:
    """Return the texts with the tokenizer in the folder of a run's model. None where there is none, or where it does
    not decode the ids in `tried` to the run's own responses next to them."""
    from cairn.engines.models.tokenizers import load_tokenizer
    from cairn.engines.types.errors import BadModel

    if ledger.manifest.imported:
        return None
    try:
        texts = Texts(load_tokenizer(from_manifest(ledger.manifest.config).model.path))
    except BadModel:
        return None
    return texts if all(texts.are_of(ids, response) for ids, response in tried) else None


def _text(texts: Texts | None, ids: Sequence[int]) -> str | None:
    return None if texts is None else texts.whole(np.asarray(ids, np.int32))


SampleKey = tuple[int, int]
"""(group_id, index in the group)."""
_TRIED = 4
"""Number of responses by which a tokenizer is recognized as the run's."""
_COLUMNS = (
    *("group_id", "sample_index", "prompt_ids", "response_ids", "response_text", "segments", "log_probs", "loss_mask"),
    *("weight_versions", "seed", "finish_reason", *(field.name for field in SEQUENCES)),
)


class CallView(Record):
    """A call by a sample's code: of a tool, a grader or the clock."""

    call: str
    """Id of the call, unique in the sample."""
    kind: str
    """A `cairn.engines.types.trajectories.CallKind`."""
    name: str
    """Name of the tool or the grader."""
    order: int | None
    """Position of its response among the sample's responses; None: it has none, and its effect is unknown."""
    arguments: str | None
    """JSON."""
    result: str | None
    """JSON; None where it failed."""
    result_digest: str | None
    """SHA-256 of a long result."""
    error: str | None
    """Why it failed."""
    began_at: float
    """Unix seconds."""
    seconds: float

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> "CallView":
        """Return the view of a call. `call`: its columns in `calls.parquet`."""
        columns = cls.model_fields.keys() - {"began_at"}
        return cls(**{name: call[name] for name in columns}, began_at=call["started_at"])


class EnvironmentView(Record):
    """Tokens from the environment."""

    ids: tuple[int, ...]
    text: str | None
    """Decoded text; None where the run's tokenizer is unavailable."""


class ResponseView(Record):
    """Response of the policy to one call."""

    call: str
    ids: tuple[int, ...]
    text: str | None
    given_tokens: int
    """Number of tokens before the response, prompt included."""
    cached_tokens: int | None
    """Number of these that were in the engine's prefix cache; None: not recorded."""
    trained_tokens: int
    """Number of its own tokens that the loss may include."""
    loss_mask: tuple[int, ...]
    """Loss mask of its own tokens: 1 for those that the loss may include."""
    log_probs: tuple[float, ...]
    """Log-probs of its tokens under the rollout engine."""
    log_prob: float | None
    """Mean of the log-probs."""
    weight_version: int | None
    """Newest weight version that sampled one of its tokens."""
    finish_reason: str | None
    error: str | None
    """Why the engine rejected the call."""
    began_at: float | None
    """Unix seconds; None: not recorded."""
    seconds: float | None

    @classmethod
    def of(
        cls,
        texts: Texts | None,
        ids: Sequence[int],
        log_probs: Sequence[float],
        loss_mask: Sequence[int],
        **others: Any,
    ) -> "ResponseView":
        """Return the view of sampled tokens. `others`: the fields that do not follow from them."""
        return cls(
            ids=tuple(ids),
            text=_text(texts, ids),
            trained_tokens=sum(loss_mask),
            loss_mask=tuple(loss_mask),
            log_probs=tuple(log_probs),
            log_prob=float(np.mean(log_probs)) if log_probs else None,
            **others,
        )


class TurnView(Record):
    """A response of the policy, with the environment's input before it and the calls after it."""

    world: EnvironmentView | None
    answer: ResponseView | None
    """The policy's response; None in a last turn that ends with input from the environment."""
    calls: tuple[CallView, ...] = ()
    reward: float | None = None
    """Reward of the turn itself, where its code assigned one."""


class TrajectoryView(Record):
    """A sequence of turns after a prompt."""

    prompt: EnvironmentView | None
    """Own prompt of the trajectory; None: it follows the sample's prompt."""
    turns: tuple[TurnView, ...]
    role: str | None = None
    """Name of the acting agent, where there are several."""
    reward: float | None = None
    """Own reward of the trajectory, where its code assigned one."""


class EpisodeView(Record):
    """All turns and calls of one sample."""

    prompt_ids: tuple[int, ...]
    trajectories: tuple[TrajectoryView, ...]
    opening: tuple[CallView, ...] = ()
    """Calls before the first response."""
    unused: tuple[TurnView, ...] = ()
    """Responses that belong to no trajectory."""
    recorded: bool = False
    """Whether its code's calls were recorded."""
    began_at: float | None = None
    """Unix seconds; None: not recorded."""
    seconds: float | None = None
    """Seconds from its first call to the end of its last."""


def episodes(
    ledger: Ledger,
    places: Mapping[SampleKey, tuple[int, str | None]],
    *,
    every: bool = False,
    skip_lost: bool = False,
) -> dict[SampleKey, EpisodeView]:
    """Return the episodes of samples with more than one call of the policy, or with other calls in their code.

    Args:
        places: iteration and shard of the rollout of each requested sample.
        every: include samples with a single response to their prompt.
        skip_lost: leave out samples whose tables are retired or damaged; else raise Retired or Damaged.
    """
    views: dict[SampleKey, EpisodeView] = {}
    texts: list[Texts | None] = []
    for place in dict.fromkeys(places.values()):
        wanted = {key for key, own in places.items() if own == place}
        groups = {group for group, _ in wanted}
        try:
            commit = ledger.find(place[0], Step.ROLLOUT, place[1])
            assert commit is not None
            rows = sample_rows(read_recorded_table(ledger.store, commit.run, commit.table, _COLUMNS), groups)
            called = calls_of(ledger.store, commit, groups)
        except (Damaged, Retired):
            if skip_lost:
                continue
            raise
        rows = {key: row for key, row in rows.items() if key in wanted}
        calls: dict[SampleKey, list[dict[str, Any]]] = {}
        for call in called:
            calls.setdefault((call["group_id"], call["sample_index"]), []).append(call)
        several = {
            key: row
            for key, row in rows.items()
            if every or row.get("segments") is not None or row.get(TRAJECTORIES.name) is not None or calls.get(key)
        }
        if several and not texts:
            tried = [(_last_ids(row), row["response_text"]) for row in several.values() if row["response_ids"]]
            texts = [run_texts(ledger, tried[:_TRIED])]
        views |= {key: _Episode(row, calls.get(key), texts[0]).view() for key, row in several.items()}
    return views


def _last_ids(row: Mapping[str, Any]) -> np.ndarray:
    """Return the tokens of `response_text`: those of the last trajectory."""
    lengths = row.get(TRAJECTORIES.name)
    ids = np.asarray(row["response_ids"], np.int32)
    return ids if lengths is None else ids[len(ids) - lengths[-1] :]


@dataclass
class _Episode:
    """Converter of one sample to a view."""

    row: Mapping[str, Any]
    calls: Sequence[Mapping[str, Any]] | None
    texts: Texts | None
    shown: set[str] = field(default_factory=set)
    """Ids of the responses whose calls have been added."""

    def __post_init__(self) -> None:
        self.of_policy = {call["call"]: call for call in self.calls or () if call["kind"] == "sample"}
        self.after: dict[str | None, list[CallView]] = {}
        for call in self.calls or ():
            if call["kind"] != "sample":
                self.after.setdefault(self._answer_before(call), []).append(CallView.of(call))

    def view(self) -> EpisodeView:
        began = [call["started_at"] for call in self.calls or ()]
        ended = [call["started_at"] + call["seconds"] for call in self.calls or ()]
        return EpisodeView(
            prompt_ids=tuple(self.row["prompt_ids"]),
            trajectories=tuple(self._trajectories()),
            opening=tuple(self.after.get(None, ())),
            unused=tuple(self._unused(call) for id, call in self.of_policy.items() if id not in self.shown),
            recorded=self.calls is not None,
            began_at=min(began, default=None),
            seconds=max(ended) - min(began) if began else None,
        )

    def _trajectories(self) -> Iterator[TrajectoryView]:
        lengths = self.row.get(TRAJECTORIES.name) or [len(self.row["response_ids"])]
        columns = (TRAJECTORY_PROMPTS.name, TRAJECTORY_ROLES.name, TRAJECTORY_REWARDS.name)
        known = (self.row.get(name) or [None] * len(lengths) for name in columns)
        spans = pairwise(np.cumsum([0, *lengths]).tolist())
        for (start, end), prompt, role, reward in zip(spans, *known, strict=True):
            yield TrajectoryView(
                prompt=None if prompt is None else self._world(prompt),
                turns=tuple(self._turns(prompt, start, end)),
                role=role,
                reward=reward,
            )

    def _segments(self) -> Iterator[tuple[int, int, Mapping[str, Any], float | None]]:
        """Yield start and end of each segment in the response, the segment, and its reward."""
        row = self.row
        segments = row.get("segments")  # the first versions wrote none
        if segments is None:
            tokens = len(row["response_ids"])
            one = {"tokens": tokens, "call": FIRST_CALL, "finish_reason": row["finish_reason"]}
            segments = [one] if tokens else []
        rewards = row.get(TURN_REWARDS.name) or [None] * len(segments)
        start = 0
        for segment, reward in zip(segments, rewards, strict=True):
            yield start, start + segment["tokens"], segment, reward
            start += segment["tokens"]

    def _turns(self, prompt: Sequence[int] | None, first: int, last: int) -> Iterator[TurnView]:
        """Yield the turns of the trajectory whose tokens are `first` to `last` of the response."""
        before = len(self.row["prompt_ids"] if prompt is None else prompt)
        world: list[int] = []
        for start, end, segment, reward in self._segments():
            if not first <= start < end <= last:
                continue
            ids = self.row["response_ids"][start:end]
            if segment["call"] is None:
                world += ids
                continue
            answer = self._answer(segment, start, end, before + start - first)
            yield self._turn(world, answer, reward)
            world = []
        if world:
            yield TurnView(world=self._world(world), answer=None)

    def _turn(self, world: list[int], answer: ResponseView, reward: float | None = None) -> TurnView:
        calls = () if answer.call in self.shown else tuple(self.after.get(answer.call, ()))
        self.shown.add(answer.call)
        return TurnView(world=self._world(world) if world else None, answer=answer, calls=calls, reward=reward)

    def _answer(self, segment: Mapping[str, Any], start: int, end: int, tokens_before: int) -> ResponseView:
        columns = ("response_ids", "log_probs", "loss_mask", "weight_versions")
        ids, log_probs, loss_mask, versions = (self.row[name][start:end] for name in columns)
        recorded = self.of_policy.get(segment["call"], {})
        return ResponseView.of(
            self.texts,
            ids,
            log_probs,
            loss_mask,
            call=segment["call"],
            given_tokens=tokens_before,
            cached_tokens=recorded.get("cached_tokens"),
            weight_version=max(versions, default=None),
            finish_reason=segment["finish_reason"],
            error=None,
            began_at=recorded.get("started_at"),
            seconds=recorded.get("seconds"),
        )

    def _unused(self, call: Mapping[str, Any]) -> TurnView:
        ids = call["response_ids"] or []
        same = ("call", "given_tokens", "cached_tokens", "finish_reason", "error", "seconds")
        answer = ResponseView.of(
            self.texts,
            ids,
            call["log_probs"] or [],
            [0] * len(ids),
            weight_version=max(call["weight_versions"] or (), default=None),
            began_at=call["started_at"],
            **{name: call[name] for name in same},
        )
        return self._turn([], answer)

    def _world(self, ids: Sequence[int]) -> EnvironmentView:
        return EnvironmentView(ids=tuple(ids), text=_text(self.texts, ids))

    def _answer_before(self, call: Mapping[str, Any]) -> str | None:
        """Return the id of the response that a call follows; None where it came before all responses."""
        answers = [one["call"] for one in self.of_policy.values() if one["order"] is not None][: call["turn"]]
        own = [id for id in answers if _same_line(_task(id), _task(call["call"]))]
        return next(iter(own[-1:] or answers[-1:]), None)


def _task(call: str) -> str:
    """Return the path of the task that made a call."""
    return call[: call.rfind(".") + 1]


def _same_line(one: str, other: str) -> bool:
    """Whether one of two tasks started the other, or both are the same."""
    return one.startswith(other) or other.startswith(one)
