"""`whatif`: compute the advantages that another algorithm would have assigned to the trained samples of an iteration.

It only reads committed snapshots: rewards, masks and scores are read in place, and the function of the advantage step
computes the rest. Nothing is scored, the run does not change, and a live driver of it is not disturbed.
"""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from cairn.configs.errors import BadInput, ConfigError
from cairn.configs.loader import from_manifest, with_section
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import RunConfig
from cairn.configs.view import reads_under
from cairn.engines.training.needs import advantage_needs
from cairn.flows.driver.trust import require_trusted
from cairn.flows.text import number, percent
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.redacted import redacted_samples
from cairn.storage.ledger.terms import differences
from cairn.storage.records import Record
from cairn.tasks.advantages.step import advantage, estimated
from cairn.tasks.batch.batch import arrays, rows_of_groups, trained_shards, trained_tokens
from cairn.tasks.durable.recorded_run import RecordedRun
from cairn.tasks.durable.selection import last_selection

# Comparison of the advantages of two algorithms: table of samples, figures of groups, and text for people.


HEADER = ("group", "samples", "reward", "|A| before", "|A| after", "sign flips", "zero before", "zero after", "corr.")
SAMPLE_HEADER = ("sample", "tokens", "reward", "A before", "A after", "sign flips")

_FLOATS = pa.list_(pa.float32())
COMPARED = pa.schema(
    [
        pa.field("iteration", pa.int64(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("trained_tokens", pa.int32(), nullable=False),
        pa.field("advantage_before", pa.float64()),  # mean over trained tokens; null: there are none
        pa.field("advantage_after", pa.float64()),
        pa.field("sign_flips", pa.int32(), nullable=False),  # trained tokens whose advantage changes its sign
        pa.field("advantages_before", _FLOATS, nullable=False),  # of every response token
        pa.field("advantages_after", _FLOATS, nullable=False),
        pa.field("returns_before", _FLOATS, nullable=False),
        pa.field("returns_after", _FLOATS, nullable=False),
    ]
)
"""Schema of the results: one row for each trained sample, in the order of the batch."""


class Figures(Record):
    """Figures of the trained tokens of some samples, before and after."""

    samples: int
    trained_tokens: int
    reward: float
    """Mean reward of the samples."""
    size_before: float | None
    """Mean absolute advantage; None where no token is trained on."""
    size_after: float | None
    sign_flips: float | None
    """Share of tokens whose advantage has the other sign."""
    zero_before: float | None
    """Share of tokens whose advantage is zero, which have no effect on training."""
    zero_after: float | None
    correlation: float | None
    """Pearson correlation; None where either is constant over all tokens."""

    @classmethod
    def of(cls, rewards: np.ndarray, before: np.ndarray, after: np.ndarray) -> "Figures":
        """Return the figures of [N] rewards of samples, and [M] advantages of their trained tokens."""
        before, after = before.astype(np.float64), after.astype(np.float64)
        varies = len(before) > 0 and np.ptp(before) > 0 and np.ptp(after) > 0
        return cls(
            samples=len(rewards),
            trained_tokens=len(before),
            reward=float(rewards.mean(dtype=np.float64)),
            size_before=_mean(np.abs(before)),
            size_after=_mean(np.abs(after)),
            sign_flips=_mean(before * after < 0),
            zero_before=_mean(before == 0),
            zero_after=_mean(after == 0),
            correlation=float(np.corrcoef(before, after)[0, 1]) if varies else None,
        )

    def line(self, name: str) -> tuple[str, ...]:
        """Return the cells under HEADER."""
        return (
            *(
                name,
                str(self.samples),
                f"{self.reward:.4f}",
                number(self.size_before, ".4f"),
                number(self.size_after, ".4f"),
            ),
            *(percent(self.sign_flips), percent(self.zero_before), percent(self.zero_after)),
            number(self.correlation, ".4f"),
        )


class Change(Record):
    """A number, or an option, before and after; None where there is none."""

    before: JsonValue
    after: JsonValue


class SampleChange(Record):
    """Mean advantage of a sample over its trained tokens, before and after."""

    group_id: int
    sample_index: int
    reward: float
    trained_tokens: int
    advantage_before: float | None
    advantage_after: float | None
    sign_flips: int

    def line(self) -> tuple[str, ...]:
        """Return the cells under SAMPLE_HEADER."""
        return (
            *(str(self.sample_index), str(self.trained_tokens), f"{self.reward:.4f}"),
            *(number(self.advantage_before, ".4f"), number(self.advantage_after, ".4f"), str(self.sign_flips)),
        )


class WhatIf(Record):
    """Advantages of an iteration under the other algorithm."""

    run: str
    iteration: int
    options: dict[str, Change]
    """Options of `algorithm` that differ from the iteration's own."""
    overall: Figures
    groups: dict[int, Figures]
    """Figures by group id, in the order of the batch."""
    samples: list[SampleChange]
    metrics: dict[str, Change]
    """Metrics of the advantage step that change."""
    notes: tuple[str, ...] = ()
    """Sentences on what the traces of an imported run lack."""

    def conclusion(self) -> str:
        """Return the overall result in one sentence."""
        one = self.overall
        changed = ", ".join(f"{name}={_value(change.after)}" for name, change in self.options.items())
        return (
            f"with {changed or 'the code of today'}, {percent(one.sign_flips)} of the {one.trained_tokens:,} trained "
            f"tokens of iteration {self.iteration} of run {self.run} change the sign of their advantage, and "
            f"{percent(one.zero_before)} → {percent(one.zero_after)} have none; the correlation is "
            f"{number(one.correlation, '.4f')}"
        )


def _value(option: JsonValue) -> str:
    return option if isinstance(option, str) else json.dumps(option)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


_SECTION = "algorithm."


class CannotCompare(BadInput):
    """The requested comparison is impossible. The message is one clear sentence."""


def what_if(ledger: Ledger, iteration: int, overrides: Sequence[str] = ()) -> tuple[WhatIf, pa.Table]:
    """Compute an iteration's advantages again. Returns the figures, and a table COMPARED.

    Args:
        overrides: `algorithm.option=value`, as `changed_config` accepts them.

    Raises CannotCompare, the errors of `changed_config`, BadPlugin where the estimator is unavailable, and Retired
    where the run no longer retains the tables.
    """
    committed = ledger.find(iteration, Step.ADVANTAGE)
    if committed is None:
        if from_manifest(ledger.manifest.config).algorithm.learns_from == "demonstrations":
            raise CannotCompare(f"run {ledger.run!r} learns from demonstrations, which have no advantages")
        numbers = [index for index in ledger.iterations() if ledger.find(index, Step.ADVANTAGE) is not None]
        available = f"those of iterations {numbers[0]} to {numbers[-1]}" if numbers else "none yet"
        raise CannotCompare(f"run {ledger.run!r} has no advantages of iteration {iteration}; it has {available}")
    recorded = ledger.config_of(committed)
    config = changed_config(ledger, recorded, overrides)
    run = _ImportedRun(config, ledger) if ledger.manifest.imported else RecordedRun(config, ledger)
    selection = last_selection(run, iteration)
    rollouts, rewards = trained_shards(run, selection)
    scores = run.find(iteration, Step.SCORE)
    _require_whole(ledger, iteration, [committed, *rollouts, *rewards, *([scores] if scores else [])])
    _require_scores(run, config.algorithm, iteration, scores)
    notes: tuple[str, ...] = ()
    before = run.read(committed)
    if isinstance(run, _ImportedRun):
        notes = run.notes(committed, rollouts, rewards)
        if before["advantages"].null_count:
            before, _ = estimated(run, recorded.algorithm, selection, rollouts, rewards, scores)
    after, metrics = estimated(run, config.algorithm, selection, rollouts, rewards, scores)
    samples = pa.concat_tables(rows_of_groups(run, selection, rollouts, ["loss_mask", "weight_versions"]))
    masks, _ = trained_tokens(run, selection, samples)
    rows = _compared(iteration, before, after, masks)
    comparison = WhatIf(
        run=ledger.run,
        iteration=iteration,
        options={
            name: Change(before=old, after=new) for name, old, new in differences(_options(recorded), _options(config))
        },
        overall=_figures(rows, masks),
        groups=_groups(rows, masks),
        samples=[SampleChange.model_validate(row) for row in rows.select(list(SampleChange.model_fields)).to_pylist()],
        metrics={
            name: Change(before=committed.metrics.get(name), after=metrics.get(name))
            for name in (committed.metrics if notes else metrics)
            if metrics.get(name) != committed.metrics.get(name) and not name.startswith("age/")
        },
        notes=notes,
    )
    return comparison, rows


class _ImportedRun(RecordedRun):
    """An imported run, with stand-ins for what an estimator reads and the traces lack: a response without tokens has
    one, and all tokens are sampled from the first weight version with log-prob 0."""

    def read(self, commit: Commit, columns: Sequence[str] | None = None) -> pa.Table:
        if commit.step is not Step.ROLLOUT:
            return super().read(commit, columns)
        table = _with_stand_ins(super().read(commit))
        return table if columns is None else table.select([name for name in table.column_names if name in columns])

    def notes(self, committed: Commit, rollouts: Sequence[Commit], rewards: Sequence[Commit]) -> tuple[str, ...]:
        """Return sentences on what is missing. Raises CannotCompare where a sample has no reward."""
        if any(super(_ImportedRun, self).read(one, ["reward"])["reward"].null_count for one in rewards):
            raise CannotCompare(
                f"some samples of iteration {committed.iteration} of run {self.ledger.run!r} have no reward, so no "
                "advantages can be computed from them"
            )
        notes = []
        if super().read(committed)["advantages"].null_count:
            estimator = from_manifest(self.ledger.manifest.config).algorithm.advantage_estimator
            notes.append(f"the traces have no advantages: those before are computed by {estimator}")
        if any(super(_ImportedRun, self).read(one)["response_ids"].null_count for one in rollouts):
            notes.append("the traces have no tokens: each response counts as one")
        return tuple(notes) or ("the run was imported: advantages before are those in its traces",)


def _with_stand_ins(table: pa.Table) -> pa.Table:
    rows = table.select(["response_ids", "loss_mask", "log_probs"]).to_pylist()
    ids = [[0] if row["response_ids"] is None else row["response_ids"] for row in rows]
    zeros = [[0] * len(own) for own in ids]
    columns = {
        "response_ids": ids,
        "loss_mask": [row["loss_mask"] or [1] * len(own) for row, own in zip(rows, ids, strict=True)],
        "log_probs": [row["log_probs"] or own for row, own in zip(rows, zeros, strict=True)],
        "weight_versions": zeros,
    }
    for name, values in columns.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, pa.array(values, table.schema.field(name).type))
    return table


def changed_config(ledger: Ledger, recorded: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of an iteration with options of its section `algorithm` changed by
    `algorithm.option=value`, checked against the rules of that section.

    Raises ConfigError for other options, where the advantage step reads none of them, and where the stored
    configuration contains what a store may not set; overrides are the user's own and trusted.
    """
    config = with_section(recorded, "algorithm", overrides, "algorithm.advantage_estimator=rloo")
    learned = [one.algorithm.learns_from for one in (recorded, config)]
    if learned[0] != learned[1]:
        raise ConfigError(
            [
                f"the run learns from {learned[0]}, but with these options it would learn from {learned[1]}, which it "
                "does not have: only advantages of the samples that it trained on can be computed"
            ]
        )
    config = require_trusted(config, ledger.store, overrides=overrides, of=f" of {ledger.run}")
    options = {override.partition("=")[0].strip() for override in overrides}
    reads = reads_under(config, advantage.reads)
    if options and options.isdisjoint(reads):
        raise ConfigError([f"advantages do not depend on {name}: the loss reads it" for name in sorted(options)])
    return config


def _require_whole(ledger: Ledger, iteration: int, commits: Sequence[Commit]) -> None:
    redacted = redacted_samples(ledger)
    decisions = sorted({redacted[commit.name] for commit in commits if commit.name in redacted})
    if decisions:
        raise CannotCompare(
            f"some samples that iteration {iteration} of run {ledger.run!r} trained on were redacted (decision "
            f"{decisions[0]}), so nothing can be computed from them"
        )


def _require_scores(run: RecordedRun, algorithm: AlgorithmConfig, iteration: int, scores: Commit | None) -> None:
    scored = None if scores is None else run.read(scores)
    for column, why in advantage_needs(algorithm).items():
        name = "log_probs" if column == "old_log_probs" else column
        if column == "old_log_probs" and algorithm.use_rollout_logprobs:
            continue
        if scored is None or name not in scored.column_names or scored[name].null_count:
            way = (
                "; algorithm.use_rollout_logprobs=true uses the rollout engine's instead"
                if column == "old_log_probs"
                else ": a fork with that option would score them"
            )
            raise CannotCompare(
                f"algorithm.{why} needs {column}, which iteration {iteration} of run {run.ledger.run!r} has not "
                f"scored{way}"
            )


def _options(config: RunConfig) -> dict[str, Any]:
    return {f"{_SECTION}{name}": value for name, value in config.algorithm.model_dump(mode="json").items()}


def _compared(iteration: int, before: pa.Table, after: pa.Table, masks: Sequence[np.ndarray]) -> pa.Table:
    trained = [mask.astype(bool) for mask in masks]
    pairs = [
        (old[mask].astype(np.float64), new[mask].astype(np.float64))
        for old, new, mask in zip(arrays(before, "advantages"), arrays(after, "advantages"), trained, strict=True)
    ]
    return pa.table(
        {
            "iteration": [iteration] * after.num_rows,
            "group_id": after["group_id"],
            "sample_index": after["sample_index"],
            "reward": after["reward"],
            "trained_tokens": [int(mask.sum()) for mask in trained],
            "advantage_before": [float(old.mean()) if len(old) else None for old, _ in pairs],
            "advantage_after": [float(new.mean()) if len(new) else None for _, new in pairs],
            "sign_flips": [int(np.count_nonzero(old * new < 0)) for old, new in pairs],
            "advantages_before": before["advantages"],
            "advantages_after": after["advantages"],
            "returns_before": before["returns"],
            "returns_after": after["returns"],
        },
        COMPARED,
    )


def _figures(rows: pa.Table, masks: Sequence[np.ndarray]) -> Figures:
    trained = np.concatenate(masks).astype(bool)
    before, after = (np.concatenate(arrays(rows, f"advantages_{when}"))[trained] for when in ("before", "after"))
    return Figures.of(rows["reward"].to_numpy(), before, after)


def _groups(rows: pa.Table, masks: Sequence[np.ndarray]) -> dict[int, Figures]:
    ids = rows["group_id"].to_numpy()
    starts = [*np.flatnonzero(np.diff(ids, prepend=ids[0] - 1)).tolist(), len(ids)]
    return {
        int(ids[start]): _figures(rows.slice(start, end - start), masks[start:end])
        for start, end in itertools.pairwise(starts)
    }
