"""Samples in the Agent Trajectory Interchange Format (ATIF 1.8), which other tools read: one JSON file for each
trajectory.

| ATIF | here |
|---|---|
| `session_id` | the sample: `run@iteration/group/index`; its trajectories share it |
| first step, of the `user` | the prompt |
| step of the `agent` | a response of the policy: text, and in `metrics` ids of its prompt and its own, and log-probs |
| `metrics.extra` | its loss mask, weight version, why it ended, and the turn's own reward |
| its `tool_calls` and `observation` | tool calls after the response, with results or errors |
| step of the `user` between | input from the environment where no tool was called |
| agent's step with `llm_call_count` 0 | tool calls before the first response |
| `extra` | reward, advantage, label, status, and the calls of graders |

Tokens after tool calls are stored once: in `prompt_token_ids` of the next response.
"""

import json
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cairn.configs.loader import from_manifest
from cairn.flows.reading.episodes import CallView, EpisodeView, ResponseView, TrajectoryView, episodes
from cairn.flows.reading.samples import SampleView, iteration_samples
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.records import Record
from cairn.storage.store.canonical import from_json

VERSION = "ATIF-v1.8"
_TOOL, _JUDGE = "tool", "judge"


class ExportedTrajectories(Record):
    """Result of an export."""

    run: str
    iteration: int
    samples: int
    files: int
    """Number of files, one for each trajectory."""


def export_atif(ledger: Ledger, folder: Path, iteration: int | None = None) -> ExportedTrajectories:
    """Write the samples of an iteration, the newest by default, into a new or empty folder, atomically.

    Raises LookupError where there are none, FileExistsError, Damaged and Retired.
    """
    ledger.manifest.require_own("record of each call")
    chosen = ledger.last_iteration() if iteration is None else iteration
    if chosen is None:
        raise LookupError(f"run {ledger.run!r} has no samples yet")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty: use a new folder")
    views = iteration_samples(ledger, chosen)
    by_sample = episodes(
        ledger, {(one.group_id, one.sample_index): (one.iteration, one.shard) for one in views}, every=True
    )
    agent = _agent(ledger)
    written = 0
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as room:
        whole = Path(room) / "whole"
        whole.mkdir()
        for view in views:
            for name, document in _documents(ledger.run, agent, view, by_sample[view.group_id, view.sample_index]):
                (whole / f"{name}.json").write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")
                written += 1
        if folder.exists():
            folder.rmdir()
        os.replace(whole, folder)
    return ExportedTrajectories(run=ledger.run, iteration=chosen, samples=len(views), files=written)


def _agent(ledger: Ledger) -> dict[str, Any]:
    config = from_manifest(ledger.manifest.config)
    function = config.rollout.custom_generate_function_path
    digest = ledger.terms.plugin_digest("rollout.custom_generate_function_path") if "." in function else None
    version = ledger.manifest.code_version.package if digest is None else digest
    return {"name": Path(function).name, "version": version, "model_name": Path(config.model.path).name}


def _documents(
    run: str, agent: dict[str, Any], view: SampleView, episode: EpisodeView
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a name and an ATIF document for each trajectory of a sample; for a failed sample, one document with its
    responses."""
    session = f"{run}@{view.iteration}/{view.group_id}/{view.sample_index}"
    answered = any(turn.answer is not None for one in episode.trajectories for turn in one.turns)
    trajectories = episode.trajectories if answered else (TrajectoryView(prompt=None, turns=episode.unused),)
    several = len(trajectories) > 1
    for number, trajectory in enumerate(trajectories):
        steps = list(_steps(view.prompt, episode, trajectory, opening=number == 0))
        for place, step in enumerate(steps, 1):
            step["step_id"] = place
        answers = [turn.answer for turn in trajectory.turns if turn.answer is not None]
        unused = len(episode.unused) if answered and not number else 0
        document = {
            "schema_version": VERSION,
            "session_id": session,
            "trajectory_id": f"{session}/{number}",
            "agent": agent,
            "steps": steps,
            "notes": f"{unused} answers that are in no trajectory are left out" if unused else None,
            "final_metrics": {
                "total_prompt_tokens": sum(answer.given_tokens for answer in answers),
                "total_completion_tokens": sum(len(answer.ids) for answer in answers),
                "total_cached_tokens": sum(answer.cached_tokens or 0 for answer in answers),
                "total_steps": len(steps),
            },
            "extra": _results(view, episode) | {"trajectory_reward": trajectory.reward, "role": trajectory.role},
        }
        name = f"{view.group_id:06d}-{view.sample_index:03d}"
        yield f"{name}.{number}" if several else name, _without_none(document)


def _results(view: SampleView, episode: EpisodeView) -> dict[str, Any]:
    """Return the run's results for the sample, such as reward and advantage."""
    names = ("reward", "advantage", "label", "status", "finish_reason", "disposition", "error")
    return {name: getattr(view, name) for name in names} | {"seconds": episode.seconds}


def _steps(prompt: str, episode: EpisodeView, trajectory: TrajectoryView, *, opening: bool) -> Iterator[dict[str, Any]]:
    own = trajectory.prompt
    yield {"source": "user", "message": prompt if own is None else own.text or ""}
    if opening and any(call.kind == _TOOL for call in episode.opening):
        yield {"source": "agent", "message": "", "llm_call_count": 0, **_calls(episode.opening)}
    before = list(episode.prompt_ids if own is None else own.ids)
    called = False
    for turn in trajectory.turns:
        if turn.world is not None:
            before += turn.world.ids
            if not called or turn.answer is None:
                yield {
                    "source": "user",
                    "message": turn.world.text or "",
                    "extra": {"token_ids": list(turn.world.ids)},
                }
        if turn.answer is None:
            continue
        yield {
            "source": "agent",
            "message": turn.answer.text or "",
            "timestamp": _time(turn.answer.began_at),
            "metrics": _metrics(turn.answer, before, turn.reward),
            **_calls(turn.calls),
        }
        before += turn.answer.ids
        called = any(call.kind == _TOOL for call in turn.calls)


def _metrics(answer: ResponseView, before: Sequence[int], reward: float | None) -> dict[str, Any]:
    exact = len(before) == answer.given_tokens  # the tokens before an answer in no trajectory are not stored
    return {
        "prompt_tokens": answer.given_tokens,
        "completion_tokens": len(answer.ids),
        "cached_tokens": answer.cached_tokens,
        "prompt_token_ids": list(before) if exact else None,
        "completion_token_ids": list(answer.ids),
        "logprobs": list(answer.log_probs),
        "extra": {
            "call": answer.call,
            "loss_mask": list(answer.loss_mask),
            "weight_version": answer.weight_version,
            "finish_reason": answer.finish_reason,
            "seconds": answer.seconds,
            "error": answer.error,
            "reward": reward,
        },
    }


def _calls(calls: Sequence[CallView]) -> dict[str, Any]:
    """Return fields of a step for the calls that followed it."""
    tools = [call for call in calls if call.kind == _TOOL]
    judges = [
        {"name": call.name, "reward": None if call.result is None else from_json(call.result), "error": call.error}
        for call in calls
        if call.kind == _JUDGE
    ]
    fields: dict[str, Any] = {"extra": {"judges": judges}} if judges else {}
    if tools:
        fields["tool_calls"] = [
            {
                "tool_call_id": call.call,
                "function_name": call.name,
                "arguments": from_json(call.arguments or "{}"),
                "extra": {"timestamp": _time(call.began_at), "seconds": call.seconds},
            }
            for call in tools
        ]
        results = [
            {"source_call_id": call.call, "content": _content(call), "extra": {"failed": call.error is not None}}
            for call in tools
            if call.order is not None
        ]
        fields["observation"] = {"results": results}
    return fields


def _content(call: CallView) -> str:
    """Return text unchanged, and every other value as JSON."""
    if call.error is not None or call.result is None:
        return call.error or ""
    value = from_json(call.result)
    return value if isinstance(value, str) else call.result


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        unchanged = ("arguments",)  # as the code passed them
        return {
            name: item if name in unchanged else _without_none(item) for name, item in value.items() if item is not None
        }
    return [_without_none(item) for item in value] if isinstance(value, list) else value
