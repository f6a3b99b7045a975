"""The turns and calls of a few samples, as the page takes them: a JSON text a sample, long results cut."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.flows.reading.episodes import CallView, EpisodeView, TurnView
from cairn.flows.report.blocks import Block

MOST = 2000
"""Characters of arguments, of a result or of an error."""


def turn_block(episodes: Mapping[int, EpisodeView]) -> Block:
    """A row a sample that is an episode. `episodes`: by the sample's row, among all."""
    block = Block(len(episodes))
    block.numbers("row", np.array(list(episodes), np.int32))
    told = [json.dumps(list(_pieces(one)), ensure_ascii=True) for one in episodes.values()]
    block.text("pieces", pa.array(told, pa.large_string()))
    return block


def _pieces(episode: EpisodeView) -> Iterator[dict[str, Any]]:
    began = episode.began_at
    yield from (_call(call, began) for call in episode.opening)
    for number, trajectory in enumerate(episode.trajectories):
        about = [trajectory.role, None if trajectory.reward is None else f"reward {trajectory.reward:.3f}"]
        if len(episode.trajectories) > 1 or any(about):
            yield {"name": f"trajectory {number}", "facts": ", ".join(filter(None, about))}
        for place, turn in enumerate(trajectory.turns):
            yield from _turn(place, turn, began)
    if episode.unused:
        yield {"name": "answers that are in no trajectory", "facts": ""}
        for place, turn in enumerate(episode.unused):
            yield from _turn(place, turn, began)


def _turn(number: int, turn: TurnView, began: float | None) -> Iterator[dict[str, Any]]:
    if turn.world is not None:
        yield {"name": "world", "facts": f"{len(turn.world.ids)} tokens", "text": _text(turn.world.text)}
    if (answer := turn.answer) is not None:
        facts = [f"call {answer.call}", f"{len(answer.ids)} tokens after {answer.given_tokens}"]
        facts += [f"{answer.cached_tokens} cached"] if answer.cached_tokens else []
        facts += [] if answer.finish_reason is None else [answer.finish_reason]
        facts += [] if turn.reward is None else [f"reward {turn.reward:.3f}"]
        facts += _timing(answer.began_at, answer.seconds, began)
        yield {"name": f"answer {number}", "facts": ", ".join(facts), "text": _text(answer.error or answer.text)}
    yield from (_call(call, began) for call in turn.calls)


def _call(call: CallView, began: float | None) -> dict[str, Any]:
    facts = [f"call {call.call}", *_timing(call.began_at, call.seconds, began)]
    facts += ["failed"] if call.error is not None else ["not answered"] if call.order is None else []
    digest = "" if call.result_digest is None else f"\nsha256 {call.result_digest}"
    return {
        "name": f"{call.kind} {call.name}".strip(),
        "facts": ", ".join(facts),
        "given": _text(call.arguments),
        "text": _text(call.result if call.error is None else call.error) + digest,
    }


def _text(text: str | None) -> str:
    if text is None:
        return ""
    return text if len(text) <= MOST else f"{text[:MOST]}… and {len(text) - MOST:,} characters more"


def _timing(at: float | None, seconds: float | None, began: float | None) -> list[str]:
    return [] if at is None or began is None else [f"at {at - began:.2f} s for {seconds or 0.0:.2f} s"]
