"""prime-rl's episodes: `rollouts/step_<n>/train/effective/traces.jsonl`, and `traces.jsonl` of an evaluation.

A line is an episode of verifiers (`verifiers.v1.Episode.to_record`) with a trace for each agent, or a single trace. A
trace is a graph of messages. Each of its branches, from the root to a leaf, is a trajectory. A message has the tokens
that it adds, with a mask of those that the policy sampled, and the log-probs and advantages of these.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cairn.engines.types.types import FinishReason
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
from cairn.storage.ledger.schemas import Status

_STEP = re.compile(r"step_(\d{1,9})")
_EFFECTIVE = "train/effective/traces.jsonl"
_TRUNCATED = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")
_LABELS = ("answer", "label", "solution", "ground_truth")

Node = Mapping[str, Any]


def _files(folder: Path) -> list[Path]:
    """Return what the trainer trained on; of a folder with a single file, that."""
    patterns = ("traces.jsonl", _EFFECTIVE, f"step_*/{_EFFECTIVE}", f"rollouts/step_*/{_EFFECTIVE}")
    return [file for pattern in patterns for file in folder.glob(pattern)]


def _step(file: Path) -> int | None:
    found = [match for part in file.parts if (match := _STEP.fullmatch(part))]
    return int(found[-1][1]) if found else None


def _read(line: Mapping[str, Any], reading: Reading) -> list[Recorded]:
    if "nodes" in line:
        return [_sample(line, line, several=False)]
    if "traces" not in line:
        raise Unreadable("it has neither traces nor nodes: it is neither an episode nor a trace of verifiers")
    traces = [record(trace, "traces") for trace in listed(line["traces"], "traces")]
    if not traces:
        return [_without_trace(line)]
    return [_sample(trace, line, several=len(traces) > 1) for trace in traces]


def _sample(trace: Mapping[str, Any], episode: Mapping[str, Any], *, several: bool) -> Recorded:
    nodes = [record(node, "nodes") for node in listed(trace.get("nodes"), "nodes")]
    branches = list(_branches(nodes))
    calls = [record(call, "calls") for call in listed(trace.get("calls"), "calls")]
    reasons = {whole(call.get("node"), "node"): call.get("finish_reason") for call in calls}
    agent = record(trace.get("agent"), "agent")
    name = content(agent.get("name"), "agent.name") or "agent"
    rewards = {one: record(value, "rewards") for one, value in record(trace.get("rewards"), "rewards").items()}
    values = {
        one: score * (1.0 if (weight := number(value.get("weight"), "weight")) is None else weight)
        for one, value in rewards.items()
        if (score := number(value.get("score"), "score")) is not None
    }
    metrics = {one: value for one, value in record(trace.get("metrics"), "metrics").items() if value is not None}
    prompt, response = _texts(nodes, branches[-1] if branches else [])
    error = _error(trace) or (None if branches else _error(episode) or "it has no messages")
    work = record(record(episode.get("run"), "run").get("work"), "work")
    last = _finish_reason([reasons.get(place) for place in (branches[-1] if branches else [])])
    truncated = trace.get("stop_condition") in _TRUNCATED or last == FinishReason.LENGTH
    trained = agent.get("trainable", True)
    tokens = [_tokens(nodes, branch, reasons) for branch in branches]
    return Recorded(
        group=_group(episode, trace, prompt) + (f" {name}" if several else ""),
        prompt=prompt,
        response=response,
        reward=sum(values.values()) if values else None,
        grader="+".join(rewards) or "verifiers",
        step=whole(work.get("step"), "step"),
        components={**values, **{one: value for one in metrics if (value := number(metrics[one], one)) is not None}}
        or None,
        label=_label(trace),
        tokens=tuple(one for one in tokens if one is not None) if all(tokens) else (),
        weight_version=whole(record(work.get("policy"), "policy").get("end"), "policy.end"),
        finish_reason=last,
        status=str(Status.FAILED if error else Status.TRUNCATED if truncated else Status.COMPLETED),
        error=error,
        seconds=_seconds(trace),
        not_trained=None if trained else f"{name} is not trained",
        metadata=_metadata(episode, trace, name),
    )


def _without_trace(episode: Mapping[str, Any]) -> Recorded:
    """Return the sample of an episode that failed before its first message."""
    data = record(record(episode.get("task"), "task").get("data"), "task.data")
    prompt = spelled(data.get("prompt")) or ""
    return Recorded(
        group=_group(episode, episode, prompt),
        prompt=prompt,
        response="",
        reward=None,
        grader="verifiers",
        status=str(Status.FAILED),
        error=_error(episode) or "it has no traces",
        not_trained="failed",
        metadata=_metadata(episode, episode, None),
    )


def _branches(nodes: Sequence[Node]) -> Iterator[list[int]]:
    """Yield the nodes of each path from a root to a leaf."""
    parents = [whole(node.get("parent"), "parent") for node in nodes]
    if any(parent is not None and parent >= place for place, parent in enumerate(parents)):
        raise Unreadable("a message of it follows a later one")
    for leaf in sorted(set(range(len(nodes))) - {parent for parent in parents if parent is not None}):
        path: list[int] = []
        place: int | None = leaf
        while place is not None:
            path.append(place)
            place = parents[place]
        yield path[::-1]


def _texts(nodes: Sequence[Node], branch: Sequence[int]) -> tuple[str, str]:
    """Return the texts of the messages before the first sampled one, and from that on."""
    first = next((place for place, node in enumerate(branch) if nodes[node].get("sampled")), len(branch))
    messages = [record(nodes[node].get("message"), "message") for node in branch]
    said = [(content(one.get("role"), "role"), spoken(one, "content", "name")) for one in messages]
    return conversation(said[:first]), conversation(said[first:])


def _tokens(nodes: Sequence[Node], branch: Sequence[int], reasons: Mapping[int | None, Any]) -> Tokens | None:
    """Return the tokens of a branch; None where it has none, as after a model behind a text API."""
    every: list[int] = []
    mask: list[int] = []
    log_probs: list[float] | None = []
    advantages: list[float] | None = []
    for place in branch:
        node = nodes[place]
        own = ids(node.get("token_ids"), "token_ids")
        sampled = [bool(one) for one in listed(node.get("mask"), "mask")]
        if len(sampled) != len(own):
            raise Unreadable(f"a message has {len(own)} token_ids and a mask of {len(sampled)}")
        count = sum(sampled)
        every += own
        mask += map(int, sampled)
        log_probs = _spread(log_probs, floats(node.get("logprobs"), count) if count else [], sampled)
        advantages = _spread(advantages, floats(node.get("advantages"), count) if count else [], sampled)
    if 1 not in mask:
        return None
    start = mask.index(1)
    finished = [_finish_reason([reasons.get(place)]) for place in branch if nodes[place].get("sampled")]
    return Tokens(
        every[:start],
        every[start:],
        mask[start:],
        None if log_probs is None else log_probs[start:],
        None if advantages is None else advantages[start:],
        segments(mask[start:], finished),
    )


def _spread(so_far: list[float] | None, values: list[float] | None, mask: Sequence[bool]) -> list[float] | None:
    """Append values of sampled tokens, and 0 for others; None once values are missing."""
    if so_far is None or values is None:
        return None
    own = iter(values)
    return [*so_far, *(next(own) if sampled else 0.0 for sampled in mask)]


def _finish_reason(reasons: Sequence[Any]) -> str | None:
    """Return the last of the reasons, in this ledger's words."""
    last = next((reason for reason in reversed(reasons) if reason is not None), None)
    return None if last is None else str(FinishReason.LENGTH if last == "length" else FinishReason.STOP)


def _group(episode: Mapping[str, Any], trace: Mapping[str, Any], prompt: str) -> str:
    named = record(episode.get("group"), "group").get("id")
    task = record(trace.get("task"), "task")
    return spelled(named) or spelled(task.get("hash")) or prompt


def _label(trace: Mapping[str, Any]) -> str | None:
    data = record(record(trace.get("task"), "task").get("data"), "task.data")
    return next((spelled(data[name]) for name in _LABELS if data.get(name) is not None), None)


def _error(of: Mapping[str, Any]) -> str | None:
    """Return the last error, where the trace or episode did not succeed."""
    errors = listed(of.get("errors"), "errors")
    if of.get("ok", True) or not errors:
        return None
    last = record(errors[-1], "errors")
    return f"{text(last.get('type'), 'type')}: {text(last.get('message'), 'message')}"


def _seconds(trace: Mapping[str, Any]) -> float | None:
    span = record(record(trace.get("timing"), "timing").get("agent"), "agent")
    start, end = number(span.get("start"), "start"), number(span.get("end"), "end")
    return end - start if start and end and end >= start else None


def _metadata(episode: Mapping[str, Any], trace: Mapping[str, Any], agent: str | None) -> dict[str, Any]:
    task = record(trace.get("task"), "task")
    named = {
        "episode": episode.get("id"),
        "trace": trace.get("id"),
        "agent": agent,
        "env": record(episode.get("env"), "env").get("id"),
        "task": task.get("data"),
        "stop_condition": trace.get("stop_condition"),
        "info": trace.get("info"),
    }
    return {name: value for name, value in named.items() if value}


PRIME_RL = Format("prime-rl", f"rollouts/step_*/{_EFFECTIVE}", _files, _read, True, _step)
