"""Comparison of results: which of two models is better, and whether the difference is significant.

Two results of the same questions are compared question by question. The difference of the scores then has the standard
error of the mean of the questions' differences (Miller 2024, "Adding Error Bars to Evals",
https://arxiv.org/abs/2411.00640, section 4.2). It is smaller than that of independent samples wherever both models find
the same questions hard.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from cairn.flows.text import percent
from cairn.storage.evals import Evaluation, read_samples, results
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store
from cairn.tasks.evaluation.benchmarks.summary import Z95

if TYPE_CHECKING:
    from cairn.flows.evaluation.evaluating import EvaluationResult

_ENGINE_SETTINGS = ("engine", "dtype", "sglang", "end_tokens")
"""Settings that change the result but not the questions."""


@dataclass(frozen=True)
class Comparison:
    """A result compared with a baseline on the same questions."""

    difference: float
    """Score minus the baseline's score."""
    low: float
    high: float
    """Bounds (with `low`) of the 95 % confidence interval of the difference; the difference itself for a single
    question."""
    margin: float
    """Decrease of the score that is tolerated."""

    @property
    def regressed(self) -> bool:
        """Whether the result is worse by more than the margin, and significantly worse."""
        return self.difference < -self.margin and self.high < 0

    @property
    def verdict(self) -> str:
        """The conclusion in a few words."""
        if self.regressed:
            return "worse"
        return "better" if self.low > 0 else "no difference seen" if self.high >= 0 else "worse, within the margin"


def name_of(result: Evaluation) -> str:
    """Return the name of the result's weights for people: `quickstart@39`, or the folder."""
    origin = result.origin
    if "run" in origin:
        iteration = origin.get("iteration")
        return f"{origin['run']}@{'initial' if iteration is None else iteration}"
    return str(origin.get("model", result.key.weights[:12]))


def questions_digest(result: Evaluation) -> str:
    """Return a digest that is equal for comparable results: the same questions with the same sampling and grading."""
    return canonical.digest([result.key.benchmark, _settings(result)])


def _settings(result: Evaluation) -> dict[str, JsonValue]:
    return {name: value for name, value in result.key.settings.items() if name not in _ENGINE_SETTINGS}


def differences(groups: Sequence[Sequence[Evaluation]]) -> dict[str, str]:
    """Return in words what tells a group from other groups of the same benchmark, by its `questions_digest`; empty
    where there are no others. `groups`: see `best_first`."""
    texts = {}
    for _, same in groupby(groups, key=lambda group: group[0].key.benchmark):
        settings = {questions_digest(group[0]): _settings(group[0]) for group in same}
        values = [{name: _spelled(value) for name, value in one.items()} for one in settings.values()]
        names = [name for name in values[0] if any(one.get(name) != values[0][name] for one in values)]
        for digest, own in zip(settings, values, strict=True):
            texts[digest] = ", ".join(f"{name} {own.get(name, 'none')}" for name in names)
    return texts


def _spelled(value: JsonValue) -> str:
    """Return a setting in few characters: digests and paths are shortened."""
    return " ".join(
        word[:12] if len(word) == 64 else word.rpartition("/")[2] for word in str(value or "none").split(" ")
    )


def compare(store: Store, result: Evaluation, baseline: Evaluation, margin: float = 0.0) -> Comparison:
    """Compare a result with a baseline on the same questions. Reads the rows of both. Raises Damaged."""
    rewards, base = (_by_question(store, one) for one in (result, baseline))
    common = sorted(rewards.keys() & base.keys())
    if not common:
        raise Damaged(f"the results in {result.key.folder} and {baseline.key.folder} have no question in common")
    differences = np.asarray([rewards[question] - base[question] for question in common])
    difference = float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return Comparison(difference, difference - Z95 * error, difference + Z95 * error, margin)


def best_first(results: Iterable[Evaluation]) -> list[list[Evaluation]]:
    """Return results in groups that can be compared, by benchmark, each with the best first."""
    ordered = sorted(results, key=lambda one: (one.key.benchmark, questions_digest(one)))
    groups = [list(group) for _, group in groupby(ordered, key=questions_digest)]
    return [sorted(group, key=lambda one: (-one.metrics["score"], one.committed_at)) for group in groups]


def find_baseline(group: Sequence[Evaluation], name: str) -> Evaluation | None:
    """Return the newest result in a group for the weights `name`: `RUN@ITER`, a folder as it was passed or absolute, or
    the first characters, at least 8, of the weights' digest."""
    named = [one for one in group if _is_named(one, name)]
    return max(named, key=lambda one: one.committed_at, default=None)


def _is_named(result: Evaluation, name: str) -> bool:
    digest = len(name) >= 8 and result.key.weights.startswith(name)
    return digest or name_of(result) in (name, str(Path(name).absolute()))


def _by_question(store: Store, result: Evaluation) -> dict[int, float]:
    """Return the mean reward of each question. A failed sample counts as wrong: 0, or the lowest reward of all where
    that is less. Raises Damaged."""
    rows = read_samples(store, result)
    for name, fits in (("prompt_index", pa.types.is_integer), ("reward", pa.types.is_floating)):
        if name not in rows.column_names or not fits(rows[name].type):
            raise Damaged(f"the table of the result in {result.key.folder} has no column {name} of numbers")
    rewards = np.asarray([np.nan if one is None else one for one in rows["reward"].to_pylist()], np.float64)
    graded = rewards[~np.isnan(rewards)]
    rewards = np.nan_to_num(rewards, nan=min(0.0, float(graded.min()) if len(graded) else 0.0))
    questions = rows["prompt_index"].fill_null(-1).to_numpy()
    return {int(question): float(rewards[questions == question].mean()) for question in np.unique(questions)}


# All results of a store, with comparable ones next to each other.


@dataclass(frozen=True)
class Standing:
    """Rank of a result."""

    rank: int
    """Rank among results of the same questions, from 1."""
    model: str
    result: Evaluation
    newest: bool
    """Whether it was computed last in its group, not counting the baseline."""
    baseline: Evaluation | None = None
    comparison: Comparison | None = None
    """Comparison with the baseline; None for the baseline itself, and where its group has none."""
    differs: str = ""
    """What tells its group from other groups of the same benchmark."""


def leaderboard(
    store: Store, benchmark: str | None = None, baseline: str | None = None, margin: float = 0.0
) -> list[Standing]:
    """Return every result, by benchmark and questions, best first, compared with the baseline where one is named.
    Raises Damaged."""
    groups = [group for group in best_first(results(store)) if benchmark in (None, group[0].key.benchmark)]
    differing = differences(groups)
    standings: list[Standing] = []
    for group in groups:
        differs = differing[questions_digest(group[0])]
        standings += (replace(one, differs=differs) for one in _ranked(store, group, baseline, margin))
    return standings


def _ranked(store: Store, group: Sequence[Evaluation], baseline: str | None, margin: float) -> list[Standing]:
    against = None if baseline is None else find_baseline(group, baseline)
    others = [one for one in group if one is not against]
    newest = max(others, key=lambda one: one.committed_at, default=None)
    return [
        Standing(
            rank,
            name_of(one),
            one,
            one is newest,
            against,
            None if against is None or one is against else compare(store, one, against, margin),
        )
        for rank, one in enumerate(group, 1)
    ]


# Text for people: the figures of one result, and a Markdown table of several.


def markdown(found: "Sequence[EvaluationResult]") -> str:
    """Return a Markdown table with a line for each result."""
    columns = list(dict.fromkeys(name for one in found for name in figures(one.result.metrics)))
    names = ["model", "benchmark", *columns, "result"]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * 2 + "---:|" * len(columns) + "---|"]
    for one in found:
        shown = figures(one.result.metrics)
        cells = [one.model, one.result.key.benchmark, *(shown.get(name, "–") for name in columns), one.source]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def figures(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return a result's figures by table column; of pass@k and maj@k only the largest k."""
    row = {f"avg@{metrics.get('n', 1):.0f}": f"{metrics['score']:.3f}"}
    if "interval_low" in metrics:
        row["95 %"] = f"{metrics['interval_low']:.3f}–{metrics['interval_high']:.3f}"
    for kind in ("pass", "maj"):
        largest = max((int(name.partition("@")[2]) for name in metrics if name.startswith(f"{kind}@")), default=1)
        if largest > 1:
            row[f"{kind}@{largest}"] = f"{metrics[f'{kind}@{largest}']:.3f}"
    row["samples"] = f"{metrics.get('samples', 0):.0f}"
    if "response_len_mean" in metrics:
        row["tokens"] = f"{metrics['response_len_mean']:.1f}"
    row["truncated"] = percent(metrics.get("truncated", 0))
    row["failed"] = f"{metrics.get('failed', 0):.0f}"
    return row
