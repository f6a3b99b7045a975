"""Tables of an imported iteration, in the schemas of the steps; what was not recorded is null."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.flows.traces.recorded import Recorded, as_json
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.schemas import (
    ADVANTAGE,
    FILTER,
    REWARD,
    TRAJECTORIES,
    TRAJECTORY_PROMPTS,
    Disposition,
    Status,
    rollout_schema,
)

SHARD = "00-000"
"""Name of the only shard of an imported iteration."""
FILES = {
    Step.ROLLOUT: "samples.parquet",
    Step.REWARD: "rewards.parquet",
    Step.FILTER: "groups.parquet",
    Step.ADVANTAGE: "advantages.parquet",
}
VERSION = "recorded"
"""Version of graders whose rewards were imported."""
_NOT_GRADED = "the traces have no reward that is a finite number"


class Batch:
    """Samples of an iteration, in groups."""

    def __init__(self, samples: Sequence[Recorded], iteration: int, first_group: int) -> None:
        """`first_group`: id of its first group."""
        groups: dict[str, list[Recorded]] = {}
        for sample in _merged(samples):
            groups.setdefault(sample.group, []).append(sample)
        self.groups = dict(enumerate(groups.values(), first_group))
        """Samples by the id of their group."""
        self.iteration = iteration
        self._rows = [(group, index, one) for group, own in self.groups.items() for index, one in enumerate(own)]

    @property
    def samples(self) -> list[Recorded]:
        """All samples, by group."""
        return [sample for *_, sample in self._rows]

    def tables(self) -> dict[Step, pa.Table]:
        """Return the table of each step."""
        return {
            Step.ROLLOUT: self._rollout(),
            Step.REWARD: self._reward(),
            Step.FILTER: self._filter(),
            Step.ADVANTAGE: self._advantage(),
        }

    def metrics(self) -> dict[Step, dict[str, float]]:
        """Return the metrics of each step, under the names that the steps of a run use."""
        samples = self.samples
        rewards = [one.reward for one in samples if one.reward is not None]
        lengths = [sum(sum(part.mask) for part in one.tokens) for one in samples if one.tokens]
        failed = sum(one.status == Status.FAILED or one.reward is None for one in samples)
        mean = {"raw_reward": float(np.asarray(rewards, np.float32).mean(dtype=np.float64))} if rewards else {}
        truncated = [one.status == Status.TRUNCATED for one in samples if one.status is not None]
        if truncated:
            mean |= {"truncated_ratio": float(np.mean(truncated))}
        if lengths:
            mean |= {
                "response_len/mean": float(np.mean(lengths)),
                "response_len/median": float(np.median(lengths)),
                "response_len/max": max(lengths),
                "response_len/min": min(lengths),
            }
        counts: dict[str, float] = {
            "samples": len(samples),
            "generated_groups": len(self.groups),
            "recovered_groups": 0,
        }
        step = next((one.step for one in samples if one.step is not None), None)
        return {
            Step.ROLLOUT: counts | ({} if step is None else {"step": step}),
            Step.REWARD: {"failed_samples": failed},
            Step.FILTER: {"groups": len(self.groups), **mean},
            Step.ADVANTAGE: mean,
        }

    def _rollout(self) -> pa.Table:
        several = any(len(one.tokens) > 1 for one in self.samples)
        schema = _nullable(rollout_schema(cut=False, several=several))
        return pa.Table.from_pylist([_rollout_row(*row) for row in self._rows], schema)

    def _reward(self) -> pa.Table:
        rows = [
            {
                "group_id": group,
                "sample_index": index,
                "reward": sample.reward,
                "components": None if sample.components is None else as_json(sample.components),
                "grader": sample.grader,
                "grader_version": VERSION,
                "status": sample.status,
                "error": sample.error or (_NOT_GRADED if sample.reward is None else None),
            }
            for group, index, sample in self._rows
        ]
        return pa.Table.from_pylist(rows, _nullable(REWARD))

    def _filter(self) -> pa.Table:
        rows = []
        for group, samples in self.groups.items():
            rewards = [one.reward for one in samples if one.reward is not None]
            reason = next((one.not_trained for one in samples if one.not_trained), None)
            rows.append(
                {
                    "group_id": group,
                    "iteration": self.iteration,
                    "shard": SHARD,
                    "kept": reason is None,
                    "disposition": str(Disposition.TRAIN if reason is None else Disposition.DROP),
                    "reason": reason,
                    "mean_reward": float(np.mean(rewards)) if rewards else None,
                    "std_reward": float(np.std(rewards)) if rewards else None,
                }
            )
        return pa.Table.from_pylist(rows, FILTER)

    def _advantage(self) -> pa.Table:
        dropped = {group for group, own in self.groups.items() if any(one.not_trained for one in own)}
        rows = []
        for group, index, sample in self._rows:
            if group not in dropped:
                advantages = _advantages(sample)
                row = {"group_id": group, "sample_index": index, "reward": sample.reward}
                rows.append({**row, "advantages": advantages, "returns": advantages})
        return pa.Table.from_pylist(rows, _nullable(ADVANTAGE))


def _merged(samples: Sequence[Recorded]) -> list[Recorded]:
    """Return the samples, with the trajectories of one session as one sample."""
    sessions: dict[object, Recorded] = {}
    for sample in samples:
        key = sample.session or object()
        before = sessions.get(key)
        both = () if before is None or not (before.tokens and sample.tokens) else (*before.tokens, *sample.tokens)
        sessions[key] = sample if before is None else replace(sample, prompt=before.prompt, tokens=both)
    return list(sessions.values())


def _rollout_row(group: int, index: int, sample: Recorded) -> Mapping[str, Any]:
    row: dict[str, Any] = {
        "group_id": group,
        "sample_index": index,
        "prompt_text": sample.prompt,
        "response_text": sample.response,
        "finish_reason": sample.finish_reason,
        "status": sample.status,
        "error": sample.error,
        "seconds": sample.seconds,
        "label": sample.label,
        "metadata": as_json({**sample.metadata, **({} if sample.step is None else {"step": sample.step})}),
    }
    if not sample.tokens:
        return row
    parts = sample.tokens
    count = sum(len(part.ids) for part in parts)
    row |= {
        "prompt_ids": parts[0].prompt_ids,
        "response_ids": [token for part in parts for token in part.ids],
        "loss_mask": [one for part in parts for one in part.mask],
        "log_probs": _joined([part.log_probs for part in parts]),
        "weight_versions": None if sample.weight_version is None else [sample.weight_version] * count,
        "segments": [piece for part in parts for piece in part.segments],
    }
    if len(parts) > 1:
        own = [None if part.prompt_ids == parts[0].prompt_ids else part.prompt_ids for part in parts]
        row |= {TRAJECTORIES.name: [len(part.ids) for part in parts], TRAJECTORY_PROMPTS.name: own}
    return row


def _advantages(sample: Recorded) -> Sequence[float] | None:
    """Return the advantage of each token; of a response without tokens, a single one."""
    own = _joined([part.advantages for part in sample.tokens]) if sample.tokens else None
    if own is not None or sample.advantage is None:
        return own
    return [sample.advantage] * (sum(len(part.ids) for part in sample.tokens) or 1)


def _joined(parts: Sequence[Sequence[float] | None]) -> list[float] | None:
    return None if any(part is None for part in parts) else [one for part in parts for one in part or ()]


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])
