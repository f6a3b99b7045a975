"""Results beside each other: which of two models is better, and whether that is more than chance.

Two results of equal questions are compared question by question. The difference of the scores then has the standard
error of the mean of the questions' differences (Miller 2024, "Adding Error Bars to Evals",
https://arxiv.org/abs/2411.00640, section 4.2), which is smaller than that of independent samples wherever both find the
same questions hard.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa

from cairn.flows.evaluation.evaluating import Found
from cairn.storage.evals import Evaluation, read_samples, results
from cairn.storage.store import canonical
from cairn.storage.store.store import Store
from cairn.tasks.evaluation.benchmarks.summary import Z95

_OF_THE_ENGINE = ("engine", "dtype", "sglang", "end_tokens")
"""Settings that make another result and no other questions."""


@dataclass(frozen=True)
class Comparison:
    """A result against a baseline, of equal questions."""

    difference: float
    """Score less the baseline's."""
    low: float
    high: float
    """95 % confidence interval of the difference; the difference itself where there is one question."""
    margin: float
    """How much less counts as a fall."""

    @property
    def regressed(self) -> bool:
        """Whether it is worse by more than the margin, and by more than chance."""
        return self.difference < -self.margin and self.high < 0

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.regressed:
            return "worse"
        return "better" if self.low > 0 else "no difference seen" if self.high >= 0 else "worse, within the margin"


def name_of(result: Evaluation) -> str:
    """Whose weights a result is of, for people: `quickstart@39`, or the folder."""
    origin = result.origin
    if "run" in origin:
        iteration = origin.get("iteration")
        return f"{origin['run']}@{'initial' if iteration is None else iteration}"
    return str(origin.get("model", result.key.weights[:12]))


def questions_digest(result: Evaluation) -> str:
    """Equal for results that can be compared: of the same questions, asked and graded alike."""
    settings = {name: value for name, value in result.key.settings.items() if name not in _OF_THE_ENGINE}
    return canonical.digest([result.key.benchmark, settings])


def compare(store: Store, result: Evaluation, baseline: Evaluation, margin: float = 0.0) -> Comparison:
    """A result against another of the same questions. Reads the rows of both. Raises Damaged."""
    ours, theirs = (_by_question(read_samples(store, one)) for one in (result, baseline))
    differences = np.asarray([ours[question] - theirs[question] for question in sorted(ours.keys() & theirs.keys())])
    difference = float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return Comparison(difference, difference - Z95 * error, difference + Z95 * error, margin)


def best_first(results: Iterable[Evaluation]) -> list[list[Evaluation]]:
    """Results in groups that can be compared, by benchmark, each with the best first."""
    ordered = sorted(results, key=lambda one: (one.key.benchmark, questions_digest(one)))
    groups = [list(group) for _, group in groupby(ordered, key=questions_digest)]
    return [sorted(group, key=lambda one: (-one.metrics["score"], one.committed_at)) for group in groups]


def find_baseline(group: Sequence[Evaluation], name: str) -> Evaluation | None:
    """Of a group, the newest result of the weights that `name` names: `RUN@ITER`, a folder as it was given or in full,
    or the beginning of the weights' digest."""
    found = [one for one in group if _is_named(one, name)]
    return max(found, key=lambda one: one.committed_at, default=None)


def _is_named(result: Evaluation, name: str) -> bool:
    digest = len(name) >= 8 and result.key.weights.startswith(name)
    return digest or name_of(result) in (name, str(Path(name).absolute()))


def _by_question(rows: pa.Table) -> dict[int, float]:
    """Mean reward of each question, a failed sample counted as wrong: 0, or the lowest of all where that is less."""
    rewards = np.asarray([np.nan if one is None else one for one in rows["reward"].to_pylist()], np.float64)
    graded = rewards[~np.isnan(rewards)]
    rewards = np.nan_to_num(rewards, nan=min(0.0, float(graded.min()) if len(graded) else 0.0))
    questions = rows["prompt_index"].to_numpy()
    return {int(question): float(rewards[questions == question].mean()) for question in np.unique(questions)}


# All results of a store, those that can be compared beside each other.


@dataclass(frozen=True)
class Standing:
    """One result's place."""

    rank: int
    """Among results of equal questions, from 1."""
    model: str
    result: Evaluation
    newest: bool
    """Whether it is the last of its group that was computed, the baseline's own aside."""
    baseline: Evaluation | None = None
    comparison: Comparison | None = None
    """Against the baseline; None for the baseline itself, and where there is none in its group."""


def leaderboard(
    store: Store, benchmark: str | None = None, baseline: str | None = None, margin: float = 0.0
) -> list[Standing]:
    """Every result, by benchmark and questions, the best first; held against the baseline where one is named. Raises
    Damaged."""
    found: list[Standing] = []
    for group in best_first(results(store)):
        if benchmark in (None, group[0].key.benchmark):
            found += _ranked(store, group, baseline, margin)
    return found


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


# Results of evaluations for people: the figures of one, and a table of several in Markdown.


def markdown(found: Sequence[Found]) -> str:
    """A table, one result a line."""
    columns = list(dict.fromkeys(name for one in found for name in figures(one.result.metrics)))
    names = ["model", "benchmark", *columns, "result"]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * 2 + "---:|" * len(columns) + "---|"]
    for one in found:
        shown = figures(one.result.metrics)
        verdict = "computed" if one.computed else "found, nothing computed"
        cells = [one.model, one.result.key.benchmark, *(shown.get(name, "–") for name in columns), verdict]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def figures(metrics: Mapping[str, float]) -> dict[str, str]:
    """What a table shows of a result, by column: of pass@k and maj@k the largest k."""
    found = {f"avg@{metrics.get('n', 1):.0f}": f"{metrics['score']:.3f}"}
    if "interval_low" in metrics:
        found["95 %"] = f"{metrics['interval_low']:.3f}–{metrics['interval_high']:.3f}"
    for kind in ("pass", "maj"):
        largest = max((int(name.partition("@")[2]) for name in metrics if name.startswith(f"{kind}@")), default=1)
        if largest > 1:
            found[f"{kind}@{largest}"] = f"{metrics[f'{kind}@{largest}']:.3f}"
    found["samples"] = f"{metrics.get('samples', 0):.0f}"
    if "response_len_mean" in metrics:
        found["tokens"] = f"{metrics['response_len_mean']:.1f}"
    found["truncated"] = f"{100 * metrics.get('truncated', 0):.1f} %"
    found["failed"] = f"{metrics.get('failed', 0):.0f}"
    return found
