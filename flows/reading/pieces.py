"""An episode as pieces of text, turn by turn, in the order in which its code received responses."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cairn.engines.types.trajectories import CallKind, CallRecord
from cairn.flows.reading.episodes import CallView, EnvironmentView, EpisodeView, ResponseView, Texts, TurnView
from cairn.flows.text import shortened

MOST = 2000
"""Characters of a call's arguments, result or error that are shown. A longer result also shows its digest."""


@dataclass(frozen=True)
class Piece:
    """A heading, facts about it, and the text under it."""

    name: str
    facts: tuple[str, ...] = ()
    text: str | None = None
    arguments: str | None = None
    """Arguments of a call, as text; None for other pieces."""
    failed: bool = False
    """Whether the text says why there is no result."""


def pieces(episode: EpisodeView) -> Iterator[Piece]:
    """Yield the pieces of an episode."""
    began = episode.began_at
    yield from (call_piece(call, began) for call in episode.opening)
    for number, trajectory in enumerate(episode.trajectories):
        about = [part for part in (trajectory.role, _reward(trajectory.reward)) if part]
        if len(episode.trajectories) > 1 or about:
            yield Piece(", ".join([f"trajectory {number} of {len(episode.trajectories)}", *about]))
        if trajectory.prompt is not None:
            yield _world_piece(trajectory.prompt, "own prompt")
        yield from _turns(trajectory.turns, began)
    if episode.unused:
        yield Piece("answers that are in no trajectory")
        yield from _turns(episode.unused, began)


def record_piece(record: CallRecord, began: float, texts: Texts | None) -> Piece:
    """Return a recorded answer that the code receives again. `began`: start of the episode, in Unix seconds."""
    if record.kind is not CallKind.SAMPLE:
        return call_piece(CallView.of({**vars(record), "result_digest": None}), began)
    segment = record.segment
    ids = [] if segment is None else segment.ids.tolist()
    log_probs = [] if segment is None or segment.log_probs is None else segment.log_probs.tolist()
    answer = ResponseView.of(
        texts,
        ids,
        log_probs,
        [1] * len(ids),
        call=record.call,
        given_tokens=record.given,
        cached_tokens=None if segment is None else segment.cached_tokens,
        weight_version=None,
        finish_reason=None if segment is None else segment.finish_reason,
        error=record.error,
        began_at=record.started_at,
        seconds=record.seconds,
    )
    return _answer_piece(record.turn, answer, began)


def call_piece(call: CallView, began: float | None) -> Piece:
    """Return a call, its arguments and its result. `began`: start of the episode, in Unix seconds."""
    failed = call.order is None or call.error is not None
    if call.order is None:
        text = "no answer is recorded: the process died during the call"
    elif call.error is not None:
        text = f"✗ {shortened(call.error, MOST)}"
    else:
        digest = "" if call.result_digest is None else f" (sha256 {call.result_digest})"
        text = f"→ {shortened(call.result or '', MOST)}{digest}"
    facts = (f"call {call.call}", _timing(call.began_at, call.seconds, began))
    return Piece(
        f"{call.kind} {call.name}".strip(),
        tuple(filter(None, facts)),
        text,
        shortened(call.arguments or "", MOST),
        failed,
    )


def _turns(turns: Iterable[TurnView], began: float | None) -> Iterator[Piece]:
    for number, turn in enumerate(turns):
        if turn.world is not None:
            yield _world_piece(turn.world, "environment")
        if turn.answer is not None:
            yield _answer_piece(number, turn.answer, began, _reward(turn.reward))
        yield from (call_piece(call, began) for call in turn.calls)


def _answer_piece(number: int, answer: ResponseView, began: float | None, reward: str = "") -> Piece:
    """Return tokens that the policy sampled. `reward`: of the turn, as text."""
    sampled = len(answer.ids)
    tokens = [f"{sampled} token{'' if sampled == 1 else 's'} after {answer.given_tokens}"]
    if answer.cached_tokens:
        tokens.append(f"{answer.cached_tokens} of those cached")
    if answer.trained_tokens != sampled:
        tokens.append(f"{answer.trained_tokens} trained on")
    if answer.log_prob is not None:
        tokens.append(f"log-prob {answer.log_prob:.3f}")
    if answer.weight_version is not None:
        tokens.append(f"version {answer.weight_version}")
    tokens += [part for part in (answer.finish_reason, _timing(answer.began_at, answer.seconds, began), reward) if part]
    text = _content(answer.text, answer.ids) if answer.error is None else f"refused: {answer.error}"
    return Piece(f"answer {number}", (f"call {answer.call}", ", ".join(tokens)), text, failed=answer.error is not None)


def _world_piece(world: EnvironmentView, name: str) -> Piece:
    count = len(world.ids)
    return Piece(name, (f"{count} token{'' if count == 1 else 's'}",), _content(world.text, world.ids))


def _reward(reward: float | None) -> str:
    return "" if reward is None else f"reward {reward:.3f}"


def _timing(at: float | None, seconds: float | None, began: float | None) -> str:
    return "" if at is None or began is None else f"at {at - began:.2f} s for {seconds or 0.0:.2f} s"


def _content(text: str | None, ids: tuple[int, ...]) -> str:
    return text if text is not None else " ".join(f"#{id}" for id in ids)
