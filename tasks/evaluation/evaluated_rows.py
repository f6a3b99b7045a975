"""Rows of an evaluation's result: samples, their grades, and their conversion for a benchmark's metrics."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from cairn.engines.types.trajectories import SampleRequest
from cairn.storage.ledger.schemas import EVALUATED, SEQUENCES, Status
from cairn.storage.store.canonical import from_json
from cairn.tasks.evaluation.questions import Questions
from cairn.tasks.generation.groups import status_of
from cairn.tasks.grading.graded import GradedSample
from cairn.tasks.rewards.grader import Graded

SAMPLES = "samples.parquet"
"""Name of the file with the rows."""


@dataclass(frozen=True)
class Answers:
    """Responses of a model, in the order of the requests, and their grades."""

    samples: Sequence[Mapping[str, Any]]
    """Columns of `GENERATED_EVALUATION`, and possibly others."""
    texts: Sequence[str]
    graded: Sequence[Graded]
    beside: Mapping[str, pa.Table] = field(default_factory=dict)
    """Tables with further records of the samples, by file name."""


def evaluated_rows(
    questions: Questions, requests: Sequence[SampleRequest], answers: Answers, grader: str, version: str
) -> pa.Table:
    """Return the rows of a result. `grader`, `version`: name and version of the grader."""
    by_index = {row.index: row for row in questions.rows}
    asked = [by_index[request.group_id] for request in requests]
    samples, graded = answers.samples, answers.graded
    n = len(samples)
    said = [(one.components or {}).get("answer") for one in graded]
    return pa.table(
        {
            "benchmark": [questions.name] * n,
            "prompt_index": [row.index for row in asked],
            "prompt_id": [str((row.metadata or {}).get("id", row.index)) for row in asked],
            "sample_index": [sample["sample_index"] for sample in samples],
            "prompt_text": [row.prompt_text for row in asked],
            "prompt_ids": [list(row.prompt_ids) for row in asked],
            "response_text": list(answers.texts),
            "response_ids": [sample["response_ids"] for sample in samples],
            "log_probs": [sample["log_probs"] for sample in samples],
            "answer": [None if answer is None else str(answer) for answer in said],
            "reward": [one.reward for one in graded],
            "components": [
                None if one.components is None else json.dumps(one.components, sort_keys=True) for one in graded
            ],
            "label": [row.label for row in asked],
            "metadata": [json.dumps(row.metadata, sort_keys=True) if row.metadata else None for row in asked],
            "grader": [one.grader or grader for one in graded],
            "grader_version": [one.version or version for one in graded],
            "finish_reason": [sample["finish_reason"] for sample in samples],
            "status": [
                str(Status.FAILED if one.reward is None else status_of(sample["finish_reason"]))
                for one, sample in zip(graded, samples, strict=True)
            ],
            "error": [one.error for one in graded],
            "seed": [request.seed for request in requests],
            "seconds": [sample["seconds"] for sample in samples],
        },
        EVALUATED,
    )


def evaluated_samples(rows: pa.Table) -> list[GradedSample]:
    """Return the rows of a result as a benchmark's metrics take them."""
    return list(map(GradedSample.of, rows.to_pylist()))


def found_answers(rows: Sequence[Mapping[str, Any]]) -> Answers:
    """Return the answers in rows of a result without failed samples."""
    samples = [
        {
            "group_id": row["prompt_index"],
            **{name: row[name] for name in ("sample_index", "response_ids", "log_probs", "finish_reason", "seconds")},
            "error": None,
            "segments": None,
            **{field.name: None for field in SEQUENCES},
        }
        for row in rows
    ]
    components = [None if row["components"] is None else from_json(row["components"]) for row in rows]
    graded = [Graded(row["reward"], one) for row, one in zip(rows, components, strict=True)]
    return Answers(samples, [row["response_text"] for row in rows], graded)
