"""`rescore`: grade the committed samples of a run again, with another grader or the current code of the same one.

The result is the rewards that the run would have had, without sampling and without training. Rollout tables are read in
place, graded as the reward step grades them, and compared with the committed rewards. The run does not change, and a
live driver of it is not disturbed.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cairn.configs.errors import BadInput, ConfigError
from cairn.configs.loader import from_manifest, with_section
from cairn.configs.schema.reward import RewardConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.models.files import folder_digest, special_tokens
from cairn.engines.types.errors import BadModel
from cairn.flows.driver.trust import require_trusted
from cairn.flows.text import code, number, table
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.redacted import REDACTED_ERROR, redacted_samples
from cairn.storage.ledger.schemas import ROLLOUT, complete
from cairn.storage.ledger.snapshots import read_recorded_table
from cairn.storage.records import Record
from cairn.storage.store.errors import Retired
from cairn.tasks.data.opening import open_data
from cairn.tasks.data.prompts import PromptRow
from cairn.tasks.grading.graders import require_findable_answer
from cairn.tasks.grading.opening import grader_args, open_grader
from cairn.tasks.grading.reward import graded_columns, graded_shard, prompt_rows
from cairn.tasks.grading.shaping import Overlong
from cairn.tasks.rewards.grader import Grading

# Whether decoded text can contain tags of thoughts because of special tokens.
#
# `cairn.tasks.rewards.boxed` looks for tags in the text with special tokens that the text without them lacks. Such a
# tag contains letters of a special token. If no special token has a part of a tag at its ends, or is such a part, both
# texts contain the same tags. A grader that reads only the tags of the first text then does not need that text.


TAGS = ("<think>", "</think>")


def can_form_tags(special: Iterable[str]) -> bool:
    """Whether text with these special tokens can contain a tag that the text without them lacks. The default special
    tokens of transformers' classes, such as `<s>`, `<unk>` and `<|endoftext|>`, cannot produce one."""
    return any(_can_form(token, tag) for token in special if token for tag in TAGS)


def _can_form(token: str, tag: str) -> bool:
    cuts = range(1, len(tag))
    at_the_ends = any(token.endswith(tag[:cut]) or token.startswith(tag[cut:]) for cut in cuts)
    return at_the_ends or tag in token or token in tag


# Results of grading a run's samples again: table of samples, figures of iterations, and text for people.


PASSED_OVER = {
    "retired": "the run no longer stores their tables",
    "redacted": "they were redacted",
    "not graded": "the run has not graded them yet",
}
"""Reasons why samples are passed over."""

HEADER = ("iteration", "samples", "mean before", "mean after", "changed", "failed before", "failed after")

RESCORED = pa.schema(
    [
        pa.field("iteration", pa.int64(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("reward_before", pa.float32()),  # null: failed
        pa.field("reward_after", pa.float32()),  # null: failed
        pa.field("error_after", pa.string()),
        pa.field("grader", pa.string(), nullable=False),  # the one that graded now …
        pa.field("grader_version", pa.string(), nullable=False),  # … and its version
    ]
)
"""Schema of the results, one row for each sample."""


class Figures(Record):
    """Figures of the samples of an iteration, or of all. A mean is over the samples with a reward; None without
    any."""

    samples: int
    changed: int
    """Number of samples whose reward has changed, including samples that fail only before or only after."""
    mean_before: float | None
    mean_after: float | None
    failed_before: int
    failed_after: int

    @classmethod
    def of(cls, rows: pa.Table) -> "Figures":
        """Return the figures of a table RESCORED."""
        before, after = rows["reward_before"], rows["reward_after"]
        return cls(
            samples=rows.num_rows,
            changed=sum(one != other for one, other in zip(before.to_pylist(), after.to_pylist(), strict=True)),
            mean_before=pc.mean(before).as_py(),
            mean_after=pc.mean(after).as_py(),
            failed_before=before.null_count,
            failed_after=after.null_count,
        )


class Rescored(Record):
    """Rewards of a run under the other grader."""

    run: str
    grader: str
    grader_version: str
    iterations: dict[int, Figures]
    overall: Figures
    passed_over: dict[str, int]
    """Number of samples by reason, see PASSED_OVER."""

    def sentences(self) -> list[str]:
        """Return sentences on the samples that were passed over."""
        return [_passed_over(count, PASSED_OVER[why]) for why, count in self.passed_over.items()]

    def conclusion(self) -> str:
        """Return the overall result in one sentence."""
        all_, own = self.overall, f"{self.grader} {self.grader_version}"
        return (
            f"{all_.changed} of {all_.samples} samples of run {self.run} get another reward from {own}: mean "
            f"{number(all_.mean_before, '.4f')} → {number(all_.mean_after, '.4f')}, failed {all_.failed_before} → "
            f"{all_.failed_after}"
        )

    def lines(self) -> list[tuple[str, ...]]:
        """Return the cells of a table under HEADER: a line for each iteration, and one for all."""
        named = [*((str(index), one) for index, one in self.iterations.items()), ("all", self.overall)]
        return [
            (
                *(name, str(one.samples), number(one.mean_before, ".4f"), number(one.mean_after, ".4f")),
                *(str(one.changed), str(one.failed_before), str(one.failed_after)),
            )
            for name, one in named
        ]

    def markdown(self) -> str:
        """Return the table, and sentences on samples that were passed over."""
        heading = f"{code(self.run)} graded again by {code(f'{self.grader} {self.grader_version}')}"
        return "\n\n".join([heading, table(HEADER, self.lines()), *self.sentences()])


def _passed_over(count: int, why: str) -> str:
    return f"{count} samples are skipped: {why}" if count > 1 else f"1 sample is skipped: {why}"


_RANGE = re.compile(r"(?P<first>\d{1,6})(?P<range>:(?P<last>\d{1,6})?)?")


class CannotRescore(BadInput):
    """The request names no samples to grade. The message is one clear sentence."""


def rescore(
    ledger: Ledger,
    iterations: str | None = None,
    overrides: Sequence[str] = (),
    report: Callable[[str], None] = lambda sentence: None,
) -> tuple[Rescored, pa.Table]:
    """Grade the samples of a run again. Returns the figures, and a table RESCORED.

    Args:
        iterations: `ITER`, `A:B` with both ends, or `A:`; all by default. Iterations shared with a parent are included.
        overrides: `reward.option=value`, as `changed_config` accepts them.
        report: called with a sentence on the work that begins.

    Raises CannotRescore, the errors of `changed_config` and `open_grader`, and BadModel where the grader needs the
    run's tokenizer and the model is no longer the run's.
    """
    numbers = _chosen(ledger, iterations)
    config = changed_config(ledger, overrides)
    parts_of: dict[int, list[pa.Table]] = {}
    own = _all_cores(config.reward)
    with closing(open_grader(own, config.retry.grader, ledger.store, args=grader_args(config))) as grader:
        if ledger.manifest.imported and grader.sees_messages:
            raise CannotRescore(
                f"{grader.name} reads prompts as messages, which an imported run does not have: use another grader"
            )
        decodes = grader.sees_whole_samples and not ledger.manifest.imported
        tokenizer = _tokenizer(ledger, config, grader) if decodes else None
        # The rows of the data contain the prompts as chats.
        row = prompt_rows(open_data(config, tokenizer)) if grader.sees_messages else None
        rescorer = _Rescorer(ledger, grader, tokenizer, Overlong.of(config), row, config.algorithm.gdpo_reward_keys)
        for shard in _ahead(rescorer.shards(numbers)):
            report(f"grading {shard.rollout.name}: {shard.samples.num_rows} samples")
            graded = rescorer.graded(shard)
            if graded.num_rows:
                parts_of.setdefault(shard.rollout.iteration, []).append(graded)
        iterations_of = {index: pa.concat_tables(parts) for index, parts in parts_of.items()}
        rows = pa.concat_tables([RESCORED.empty_table(), *iterations_of.values()])
        if not rows.num_rows and not rescorer.passed_over:
            raise CannotRescore(f"run {ledger.run!r} has no samples there yet")
        figures = Rescored(
            run=ledger.run,
            grader=grader.name,
            grader_version=grader.version,
            iterations={index: Figures.of(part) for index, part in iterations_of.items()},
            overall=Figures.of(rows),
            passed_over=dict(rescorer.passed_over),
        )
    return figures, rows


def changed_config(ledger: Ledger, overrides: Sequence[str]) -> RunConfig:
    """Return a run's configuration with options of its section `reward` changed by `reward.option=value`.

    An override of `rm_type` also resets `custom_rm_path` and `rm_type_key`, unless they are overridden too: the grader
    then grades all samples, as in a benchmark.

    Raises ConfigError for other options, and where the stored configuration contains what a store may not set;
    overrides are the user's own and trusted. Raises BadPlugin for a grader that would pay for nothing.
    """
    recorded = from_manifest(ledger.manifest.config)
    if not recorded.samples_responses:
        raise ConfigError(
            [
                f"the responses of run {ledger.run!r} come from its data and were not graded, so they cannot be graded "
                "again"
            ]
        )
    options = {override.partition("=")[0].strip() for override in overrides}
    if ledger.manifest.imported and options.isdisjoint({"reward.rm_type", "reward.custom_rm_path"}):
        raise CannotRescore(
            f"run {ledger.run!r} was imported and graded by code that its traces do not have: name a grader with "
            "--reward, such as --reward math or --reward rewards.py:grade"
        )
    if "reward.rm_type" in options:  # for all samples, whatever their rows name
        others = {"reward.custom_rm_path", "reward.rm_type_key"} - options
        overrides = [*overrides, *(f"{other}=null" for other in sorted(others))]
    config = with_section(recorded, "reward", overrides, "reward.rm_type=math")
    if "reward.rm_type" in options and config.reward.custom_rm_path is None:
        require_findable_answer(config.reward.rm_type)
    return require_trusted(config, ledger.store, overrides=overrides, of=f" of {ledger.run}")


def grader_override(grader: str) -> str:
    """Return the override that selects a grader by its name, or by the import path or file of a custom one."""
    return f"reward.{'custom_rm_path' if '.' in grader else 'rm_type'}={grader}"


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
        available = f"{numbers[0]} to {numbers[-1]}" if numbers else "none yet"
        raise CannotRescore(f"{iterations!r} are not iterations of run {ledger.run!r}; it has {available}")
    return chosen


def _tokenizer(ledger: Ledger, config: RunConfig, grader: Grading) -> Any:
    """Return the run's tokenizer, since another one would decode the same tokens to other text. None where the recorded
    texts are equal to the decoded ones, as far as the grader reads them."""
    folder, recorded = Path(config.model.path), ledger.terms.inputs.get("model")
    special = None if grader.sees_tokens else special_tokens(folder)
    if special is None or can_form_tags(special):
        from cairn.engines.models.tokenizers import load_tokenizer  # other graders need none of its imports

        tokenizer = load_tokenizer(config.model.path)
    else:
        tokenizer = None
    if recorded is not None and folder_digest(folder, recorded) != recorded:
        raise BadModel(f"{config.model.path} is not the model of run {ledger.run}, whose tokenizer the grader needs")
    return tokenizer


def _all_cores(reward: RewardConfig) -> RewardConfig:
    """Return the options with one process for each core: graders are independent, and nothing else runs meanwhile."""
    return reward.model_copy(update={"num_workers": max(reward.num_workers, os.cpu_count() or 1)})


@dataclass(frozen=True)
class _Shard:
    rollout: Commit
    samples: pa.Table
    before: pa.Table
    """Column `reward`, of the same rows."""


def _ahead(shards: Iterator[_Shard]) -> Iterator[_Shard]:
    """Yield the shards, and read the next one in the background."""
    with ThreadPoolExecutor(1) as reader:
        pending = reader.submit(next, shards, None)
        while (shard := pending.result()) is not None:
            pending = reader.submit(next, shards, None)
            yield shard


class _Rescorer:
    """Grades shards, and counts the samples that it passes over."""

    def __init__(
        self,
        ledger: Ledger,
        grader: Grading,
        tokenizer: Any,
        overlong: Overlong | None,
        row: Callable[[int], PromptRow] | None,
        reward_keys: Sequence[str],
    ) -> None:
        self._ledger, self._grader, self._tokenizer, self._overlong = ledger, grader, tokenizer, overlong
        self._row, self._reward_keys = row, reward_keys
        self._redacted = redacted_samples(ledger)
        self._columns = graded_columns(grader, overlong, tokens=tokenizer is not None)
        self.passed_over: Counter[str] = Counter()

    def shards(self, iterations: Sequence[int]) -> Iterator[_Shard]:
        """Yield all shards that can be graded, in order."""
        for index in iterations:
            commits = {(commit.step, commit.shard): commit for commit in self._ledger.commits(index)}
            for (step, name), rollout in commits.items():
                shard = self._shard(rollout, commits.get((Step.REWARD, name))) if step is Step.ROLLOUT else None
                if shard is not None:
                    yield shard

    def _shard(self, rollout: Commit, rewards: Commit | None) -> _Shard | None:
        if rewards is None:
            self.passed_over["not graded"] += rollout.table.rows or 0
            return None
        try:
            samples = complete(self._read(rollout, self._columns), ROLLOUT)
            before = self._read(rewards, ["reward"])
        except Retired:
            self.passed_over["retired"] += rollout.table.rows or 0
            return None
        if rollout.name in self._redacted:
            readable = pc.fill_null(pc.not_equal(samples["error"], REDACTED_ERROR), True)
            samples, before = samples.filter(readable), before.filter(readable)
            if redacted := pc.sum(pc.invert(readable)).as_py():
                self.passed_over["redacted"] += redacted
        return _Shard(rollout, samples, before)

    def graded(self, shard: _Shard) -> pa.Table:
        """Return a table RESCORED."""
        graded = graded_shard(
            self._grader, self._tokenizer, shard.samples, self._overlong, self._row, self._reward_keys
        )
        rows = pa.table(
            {
                "iteration": [shard.rollout.iteration] * shard.samples.num_rows,
                "group_id": graded.table["group_id"],
                "sample_index": graded.table["sample_index"],
                "reward_before": shard.before["reward"],
                "reward_after": graded.table["reward"],
                "error_after": graded.table["error"],
                "grader": graded.table["grader"],
                "grader_version": graded.table["grader_version"],
            },
            RESCORED,
        )
        finished = [one is not None for one in graded.results]  # the others are graded where their group is
        return rows.filter(pa.array(finished, pa.bool_()))

    def _read(self, commit: Commit, columns: Sequence[str]) -> pa.Table:
        return read_recorded_table(self._ledger.store, commit.run, commit.table, columns)
