"""Trajectories in the Agent Trajectory Interchange Format, one JSON file each, as `cairn export --format atif` and
Harbor write them.

The steps before the agent's first are the prompt. `metrics` of an agent's step may have its tokens. ATIF has no
rewards: those of Cairn's exports are in `extra`. Files of one `session_id` are the trajectories of one sample.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cairn.flows.traces.recorded import (
    Format,
    Reading,
    Recorded,
    Tokens,
    Unreadable,
    content,
    conversation,
    floats,
    ids,
    listed,
    number,
    record,
    segments,
    spelled,
    spoken,
    text,
    whole,
)
from cairn.storage.store.canonical import from_json

_SESSION = re.compile(r"(?P<group>.+@\d{1,6}/\d+)/\d+")
"""Form of `session_id` in exports of Cairn."""


def _files(folder: Path) -> list[Path]:
    trials = ("*.json", "agent/trajectory.json", "*/agent/trajectory.json", "*/*/agent/trajectory.json")
    return [file for pattern in trials for file in folder.glob(pattern) if _is_atif(file)]


def _is_atif(file: Path) -> bool:
    """Whether the file names the format near its start, where writers put it. Other JSON files are no traces."""
    try:
        with file.open("rb") as opened:
            return b"ATIF" in opened.read(4096)
    except OSError:
        return False


def _read(data: bytes, reading: Reading) -> list[Recorded]:
    document = record(from_json(data), "the file")
    if not str(document.get("schema_version")).startswith("ATIF"):
        raise Unreadable("it is not in the Agent Trajectory Interchange Format: it has no schema_version ATIF-v1.…")
    session = content(document.get("session_id"), "session_id")
    steps = [record(step, "steps") for step in listed(document.get("steps"), "steps")]
    first = next((place for place, step in enumerate(steps) if _is_answer(step)), len(steps))
    prompt = conversation([_spoken(step) for step in steps[:first]])
    extra = record(document.get("extra"), "extra")
    own = _SESSION.fullmatch(session)
    agent = record(document.get("agent"), "agent")
    tokens = _tokens(steps)
    return [
        Recorded(
            group=own["group"] if own else prompt,
            prompt=prompt,
            response=conversation([_spoken(step) for step in steps[first:]]),
            reward=number(extra.get("reward"), "extra.reward"),
            grader="atif",
            session=session or None,
            label=spelled(extra.get("label")),
            advantage=number(extra.get("advantage"), "extra.advantage"),
            tokens=tokens,
            weight_version=max(_versions(steps), default=None),
            finish_reason=spelled(extra.get("finish_reason")),
            status=spelled(extra.get("status")),
            error=spelled(extra.get("error")),
            seconds=number(extra.get("seconds"), "extra.seconds"),
            metadata={"session": session, "agent": agent, "notes": document.get("notes")},
        )
    ]


def _is_answer(step: Mapping[str, Any]) -> bool:
    return step.get("source") == "agent" and step.get("llm_call_count") != 0


def _spoken(step: Mapping[str, Any]) -> tuple[str, str]:
    found = listed(record(step.get("observation"), "observation").get("results"), "results")
    results = [f"\n[result] {content(record(one, 'results').get('content'), 'content')}" for one in found]
    return text(step.get("source"), "source"), "".join([spoken(step, "message", "function_name"), *results])


def _metrics(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [record(step.get("metrics"), "metrics") for step in steps if _is_answer(step)]


def _versions(steps: Sequence[Mapping[str, Any]]) -> list[int]:
    found = (record(one.get("extra"), "extra").get("weight_version") for one in _metrics(steps))
    return [version for one in found if (version := whole(one, "weight_version")) is not None]


def _tokens(steps: Sequence[Mapping[str, Any]]) -> tuple[Tokens, ...]:
    """Return the trajectories of the agent's answers: an answer continues a trajectory if its prompt begins with that.
    Empty where an answer has no tokens."""
    trajectories: list[Tokens] = []
    answers = [place for place, step in enumerate(steps) if _is_answer(step)] or [0]
    opening = [token for step in steps[: answers[0]] for token in _given(step)]
    for metrics in _metrics(steps):
        if metrics.get("prompt_token_ids") is None or metrics.get("completion_token_ids") is None:
            return ()
        before = ids(metrics["prompt_token_ids"], "prompt_token_ids")
        sampled = ids(metrics["completion_token_ids"], "completion_token_ids")
        extra = record(metrics.get("extra"), "extra")
        own = floats(extra.get("loss_mask"), len(sampled))
        mask = [1] * len(sampled) if own is None else [int(bool(one)) for one in own]
        log_probs = floats(metrics.get("logprobs"), len(sampled))
        last = trajectories[-1] if trajectories else None
        so_far = [*last.prompt_ids, *last.ids] if last else []
        if last is None or before[: len(so_far)] != so_far:
            so_far = before if last else before[: len(before) - len(opening)]
            last = Tokens(so_far, [], [], [], None, [])
            trajectories.append(last)
        world = before[len(so_far) :]
        both = None if last.log_probs is None or log_probs is None else [*last.log_probs, *([0.0] * len(world))]
        answer = {
            "tokens": len(sampled),
            "call": str(sum(one["call"] is not None for each in trajectories for one in each.segments)),
            "seed": None,
            "finish_reason": spelled(extra.get("finish_reason")),
        }
        trajectories[-1] = Tokens(
            last.prompt_ids,
            [*last.ids, *world, *sampled],
            [*last.mask, *([0] * len(world)), *mask],
            None if both is None else [*both, *(log_probs or [])],
            None,
            [*last.segments, *segments([0] * len(world)), answer],
        )
    if trajectories:
        rest = [token for step in steps[answers[-1] + 1 :] for token in _given(step)]
        last, zeros = trajectories[-1], [0] * len(rest)
        trajectories[-1] = replace(
            last,
            ids=[*last.ids, *rest],
            mask=[*last.mask, *zeros],
            log_probs=None if last.log_probs is None else [*last.log_probs, *zeros],
            segments=[*last.segments, *segments(zeros)],
        )
    return tuple(one for one in trajectories if one.ids)


def _given(step: Mapping[str, Any]) -> list[int]:
    """Return the tokens of a step of the environment, which Cairn's exports have."""
    return ids(record(step.get("extra"), "extra").get("token_ids"), "token_ids")


ATIF = Format("atif", "*.json of cairn export --format atif, or trajectory.json", _files, _read, False, one_batch=True)
