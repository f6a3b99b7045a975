"""Lines that show an episode to people: turn by turn, in the order in which its code received answers."""

from collections.abc import Iterator

from rich.text import Text

from cairn.engines.types.trajectories import CallKind, CallRecord
from cairn.flows.reading.episodes import CallView, EnvironmentView, EpisodeView, ResponseView, Texts, TurnView
from cairn.flows.text import printable, shortened

MOST = 2000
"""Characters of a result that are shown. A longer one also shows its digest; `--json` shows all of it."""


def episode_lines(episode: EpisodeView) -> Iterator[Text]:
    """Yield a heading and a text for each part of an episode."""
    began = episode.began_at
    for call in episode.opening:
        yield from call_lines(call, began)
    several = len(episode.trajectories) > 1
    for number, trajectory in enumerate(episode.trajectories):
        about = [part for part in (trajectory.role, _reward(trajectory.reward)) if part]
        if several or about:
            yield Text(printable(", ".join([f"trajectory {number} of {len(episode.trajectories)}", *about])), "bold")
        if trajectory.prompt is not None:
            yield from world_lines(trajectory.prompt, "own prompt")
        yield from _turns(trajectory.turns, began)
    if episode.unused:
        yield Text("answers that are in no trajectory", "bold")
        yield from _turns(episode.unused, began)
    if episode.seconds is not None:
        yield Text(f"{episode.seconds:.2f} s from the first call to the end of the last", "dim")


def answer_lines(number: int, answer: ResponseView, began: float | None, reward: str = "") -> Iterator[Text]:
    """Yield lines for tokens that the policy sampled.

    Args:
        began: start of the episode, in Unix seconds.
        reward: reward of the turn, as text.
    """
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
    yield _heading(f"answer {number}", f"call {answer.call}", ", ".join(tokens))
    if answer.error is not None:
        yield Text(printable(f"refused: {answer.error}"), "red")
    else:
        yield _content(answer.text, answer.ids)


def world_lines(world: EnvironmentView, name: str = "environment") -> Iterator[Text]:
    """Yield lines for tokens of the environment."""
    count = len(world.ids)
    yield _heading(name, f"{count} token{'' if count == 1 else 's'}")
    yield _content(world.text, world.ids)


def call_lines(call: CallView, began: float | None) -> Iterator[Text]:
    """Yield lines for a call, its arguments and its result.

    `began`: start of the episode, in Unix seconds.
    """
    what = f"{call.kind} {call.name}".strip()
    yield _heading(printable(what), f"call {call.call}", _timing(call.began_at, call.seconds, began))
    if call.arguments is not None:
        yield Text(printable(shortened(call.arguments, MOST)))
    if call.order is None:
        yield Text("no answer is recorded: the process died during the call", "red")
    elif call.error is not None:
        yield Text(printable(f"✗ {shortened(call.error, MOST)}"), "red")
    else:
        suffix = "" if call.result_digest is None else f" (sha256 {call.result_digest})"
        yield Text(printable(f"→ {shortened(call.result or '', MOST)}{suffix}"))


def record_lines(record: CallRecord, began: float, texts: Texts | None) -> Iterator[Text]:
    """Yield lines for a recorded answer that the code receives again."""
    if record.kind is not CallKind.SAMPLE:
        yield from call_lines(CallView.of({**vars(record), "result_digest": None}), began)
        return
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
    yield from answer_lines(record.turn, answer, began)


def _turns(turns: tuple[TurnView, ...], began: float | None) -> Iterator[Text]:
    for number, turn in enumerate(turns):
        if turn.world is not None:
            yield from world_lines(turn.world)
        if turn.answer is not None:
            yield from answer_lines(number, turn.answer, began, _reward(turn.reward))
        for call in turn.calls:
            yield from call_lines(call, began)


def _heading(name: str, *facts: str) -> Text:
    return Text.assemble((f"{name} ", "bold dim"), ("   ".join(filter(None, facts)), "dim"))


def _reward(reward: float | None) -> str:
    return "" if reward is None else f"reward {reward:.3f}"


def _timing(at: float | None, seconds: float | None, began: float | None) -> str:
    return "" if at is None or began is None else f"at {at - began:.2f} s for {seconds or 0.0:.2f} s"


def _content(text: str | None, ids: tuple[int, ...]) -> Text:
    return Text(printable(text)) if text is not None else Text(" ".join(f"#{id}" for id in ids))
