"""`rescore`: the committed samples of a run graded again by another grader, or by today's code of the same one.

What the rewards would have been, without sampling and without training: rollout tables are read where they lie, graded
as the reward step grades, and held against the rewards that were committed. Nothing of the run is changed, and a live
driver of it is not disturbed.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cairn.configs.errors import ConfigError
from cairn.configs.loader import inherit
from cairn.configs.schema.reward import RewardConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.errors import BadModel
from cairn.flows.driver.trust import require_trusted
from cairn.flows.rescore.rescored import RESCORED, Figures, Rescored
from cairn.storage.commits import Commit, Step
from cairn.storage.errors import Retired
from cairn.storage.ledger import Ledger
from cairn.storage.redacted import MARK, redacted_samples
from cairn.storage.snapshots import read_table
from cairn.tasks.reward import graded_shard
from cairn.tasks.rewards.pool import GraderPool

_SECTION = "reward."
_RANGE = re.compile(r"(?P<first>\d{1,6})(?P<range>:(?P<last>\d{1,6})?)?")


class CannotRescore(Exception):
    """What was asked for is not there. The message is one clear sentence."""


def rescore(
    ledger: Ledger,
    iterations: str | None = None,
    overrides: Sequence[str] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[Rescored, pa.Table]:
    """Grade what a run sampled again. Returns the figures, and a table RESCORED.

    Args:
        iterations: `ITER`, `A:B` with both ends, or `A:`; all by default. What is shared with a parent is among them.
        overrides: `reward.option=value`, as `changed_config` takes them.
        tell: is called with what is done now.

    Raises CannotRescore, what `changed_config` and `GraderPool` raise, and BadModel where the grader needs the run's
    tokenizer and the model is not the run's any more.
    """
    numbers = _chosen(ledger, iterations)
    config = changed_config(ledger, overrides)
    found: dict[int, pa.Table] = {}
    with GraderPool(config.reward, config.retry.grader) as grader:
        again = _Again(ledger, grader, _tokenizer(ledger, config) if grader.sees_whole_samples else None)
        for index in numbers:
            parts = list(again.iteration(index, tell))
            if parts:
                found[index] = pa.concat_tables(parts)
        rows = pa.concat_tables([RESCORED.empty_table(), *found.values()])
        if not rows.num_rows and not again.passed_over:
            raise CannotRescore(f"run {ledger.run!r} has no samples there yet")
        figures = Rescored(
            run=ledger.run,
            grader=grader.name,
            grader_version=grader.version,
            iterations={index: Figures.of(part) for index, part in found.items()},
            overall=Figures.of(rows),
            passed_over=dict(again.passed_over),
        )
    return figures, rows


def changed_config(ledger: Ledger, overrides: Sequence[str]) -> RunConfig:
    """A run's configuration with options of its section `reward` changed by `reward.option=value`. Where `rm_type` is
    given and `custom_rm_path` is not, that is none: a grader by name, as of a benchmark.

    Raises ConfigError for other options, and where a store must not ask for what the configuration does: what is given
    here is the user's word.
    """
    problems = [
        f"--set {override}: only options of the section reward can be changed here, such as reward.rm_type=math; "
        "`cairn fork` changes others"
        for override in overrides
        if not override.strip().startswith(_SECTION)
    ]
    if problems:
        raise ConfigError(problems)
    given = {override.partition("=")[0].strip().removeprefix(_SECTION) for override in overrides}
    if "rm_type" in given and "custom_rm_path" not in given:
        overrides = [*overrides, f"{_SECTION}custom_rm_path=null"]
    config = inherit(ledger.manifest.config, overrides)
    usual = RewardConfig().model_dump(include=given)
    stored = config.model_copy(update={"reward": config.reward.model_copy(update=usual)})
    require_trusted(stored, ledger.store, of=f" of {ledger.run}")
    return config


def _chosen(ledger: Ledger, iterations: str | None) -> list[int]:
    numbers = ledger.iterations()
    if iterations is None:
        return numbers
    match = _RANGE.fullmatch(iterations)
    if match is None:
        raise CannotRescore(f"{iterations!r} is neither ITER nor A:B, such as 39 or 0:39")
    first = int(match["first"])
    last = int(match["last"]) if match["last"] else first if match["range"] is None else max([first, *numbers])
    chosen = [index for index in numbers if first <= index <= last]
    if first > last or not {first, last} <= set(chosen):
        there = f"{numbers[0]} to {numbers[-1]}" if numbers else "none yet"
        raise CannotRescore(f"{iterations!r} are no iterations of run {ledger.run!r}; it has {there}")
    return chosen


def _tokenizer(ledger: Ledger, config: RunConfig) -> Any:
    """The run's: another one would make other texts of the same tokens."""
    from cairn.engines.models import folder_digest
    from cairn.flows.driver.validation import load_tokenizer  # the graders of three arguments need none of its imports

    tokenizer, recorded = load_tokenizer(config.model.path), ledger.terms.inputs.get("model")
    if recorded is not None and folder_digest(Path(config.model.path)) != recorded:
        raise BadModel(f"{config.model.path} is not the model of run {ledger.run}, whose tokenizer the grader needs")
    return tokenizer


class _Again:
    """Grades iterations, and counts what it passes over."""

    def __init__(self, ledger: Ledger, grader: GraderPool, tokenizer: Any) -> None:
        self._ledger, self._grader, self._tokenizer = ledger, grader, tokenizer
        self._redacted = redacted_samples(ledger)
        self.passed_over: Counter[str] = Counter()

    def iteration(self, index: int, tell: Callable[[str], None]) -> Iterator[pa.Table]:
        """Tables RESCORED of its shards, none of them empty."""
        commits = {(commit.step, commit.shard): commit for commit in self._ledger.commits(index)}
        for (step, shard), rollout in commits.items():
            if step is Step.ROLLOUT:
                tell(f"grading {rollout.name}: {rollout.outputs[0].rows} samples")
                rows = self._shard(rollout, commits.get((Step.REWARD, shard)))
                if rows.num_rows:
                    yield rows

    def _shard(self, rollout: Commit, rewards: Commit | None) -> pa.Table:
        if rewards is None:
            self.passed_over["not graded"] += rollout.outputs[0].rows or 0
            return RESCORED.empty_table()
        try:
            samples, before = self._read(rollout), self._read(rewards)
        except Retired:
            self.passed_over["retired"] += rollout.outputs[0].rows or 0
            return RESCORED.empty_table()
        if rollout.name in self._redacted:
            kept = pc.fill_null(pc.not_equal(samples["error"], MARK), True)
            samples, before = samples.filter(kept), before.filter(kept)
            if redacted := pc.sum(pc.invert(kept)).as_py():
                self.passed_over["redacted"] += redacted
        shard = graded_shard(self._grader, self._tokenizer, samples)
        n = samples.num_rows
        rows = pa.table(
            {
                "iteration": [rollout.iteration] * n,
                "group_id": shard.table["group_id"],
                "sample_index": shard.table["sample_index"],
                "reward_before": before["reward"],
                "reward_after": shard.table["reward"],
                "error_after": shard.table["error"],
                "grader": shard.table["grader"],
                "grader_version": shard.table["grader_version"],
            },
            RESCORED,
        )
        finished = [one is not None for one in shard.results]  # the others are graded where their group is
        return rows.filter(pa.array(finished, pa.bool_()))

    def _read(self, commit: Commit) -> pa.Table:
        return read_table(self._ledger.store, commit.run, commit.outputs[0])
