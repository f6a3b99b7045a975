"""`bisect`: find the update that lost a benchmark, and which of its groups did it.

The versions between a good one and a bad one are evaluated by halves: at most ⌈log₂ n⌉ of n updates. Then the update is
made again from the version before it, once without each group, and the weights are evaluated. Results are stored as
those of `cairn eval`, so an interrupted search finds them again. The run does not change, and may be running.

An update without a group is the committed one with the group's tokens taken out of the loss, as by
`rollout.rollout_sample_filter_path`: the loss mask of its samples is 0. The other samples keep their advantages, and
the divisors of the loss stay, so that each of them weighs what it weighed.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cairn.configs.errors import BadInput, Failure
from cairn.configs.schema.evaluation import Benchmark, EngineOptions
from cairn.engines.training.batching import split_steps
from cairn.engines.types.types import TrainBatch
from cairn.flows.driver.trust import recorded_config
from cairn.flows.evaluation.benchmarks import OwnBenchmark
from cairn.flows.evaluation.comparing import Comparison, compare, questions_digest
from cairn.flows.evaluation.evaluating import SEED, Watcher, evaluate_models
from cairn.flows.evaluation.models import ModelFolder, models_of
from cairn.flows.events import Event
from cairn.flows.export.model import ADAPTER, CannotExport, copy_tokenizer
from cairn.flows.history.replay import read_only_context
from cairn.flows.text import number, percent
from cairn.storage.evals import Evaluation, results
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.records import Record
from cairn.storage.store.errors import Retired, StoreError
from cairn.storage.store.store import Store
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.trainer.recovery import committed_batch, require_unredacted, restore_trainer

INITIAL = -1
"""Number of the version before the first update."""
HEADER = ("version", "score", "against good", "95 %", "verdict", "result")
GROUP_HEADER = ("group", "samples", "tokens", "|A| of update", "score without", "regained", "95 % of the gain")


class CannotBisect(BadInput):
    """The search is impossible as requested. The message is one clear sentence."""


class Version(Record):
    """Evaluated weights, compared with those of the good version."""

    iteration: int | None
    """Iteration that published the weights; None: the initial ones."""
    score: float
    difference: float
    """Score minus that of the good version."""
    low: float
    high: float
    """Bounds of the 95 % confidence interval of the difference."""
    lost: bool
    computed: bool
    """False: the result was in the store."""

    def line(self) -> tuple[str, ...]:
        """Return the cells under HEADER."""
        name = "initial" if self.iteration is None else str(self.iteration)
        return (
            *(name, f"{self.score:.4f}", f"{self.difference:+.4f}", f"{self.low:+.4f} to {self.high:+.4f}"),
            *("lost" if self.lost else "good", "computed" if self.computed else "found in the store"),
        )


class GroupEffect(Record):
    """The update without one of its groups."""

    group_id: int
    samples: int
    tokens: int
    """Trained tokens."""
    share: float
    """Share of the update's sum of absolute advantages over trained tokens."""
    score: float | None
    """Score of the weights without the group; None: not tried, since an optimizer step has no other trained token."""
    regained: float | None
    """Share of the lost score that is there without the group."""
    low: float | None
    high: float | None
    """Bounds of the 95 % confidence interval of the score without the group minus the score after the update."""

    def line(self) -> tuple[str, ...]:
        """Return the cells under GROUP_HEADER."""
        interval = "–" if self.low is None else f"{self.low:+.4f} to {self.high:+.4f}"
        return (
            *(str(self.group_id), str(self.samples), str(self.tokens), percent(self.share)),
            *(number(self.score, ".4f"), percent(self.regained), interval),
        )


class Bisected(Record):
    """Result of a search."""

    run: str
    benchmark: str
    good: int | None
    bad: int | None
    margin: float
    """A version has lost the benchmark if its score is lower than the good version's by more than this, and
    significantly lower."""
    versions: tuple[Version, ...]
    """Evaluated versions, the two ends first."""
    evaluations: int
    """Number of versions that were evaluated between the ends."""
    iteration: int
    """Iteration whose update lost the benchmark."""
    before: float
    after: float
    """Scores before and after this update."""
    low: float
    high: float
    """Bounds of the 95 % confidence interval of the difference."""
    groups: tuple[GroupEffect, ...] = ()
    """Groups without which the update was made, by score, the best first."""
    groups_of_update: int = 0
    """Number of groups with trained tokens."""
    not_made: str | None = None
    """Why the update could not be made again without a group; None where it was made, or not asked for."""

    def culprit(self) -> GroupEffect | None:
        """Return the group that explains the loss: the only one without which more than half of the lost score is
        there, significantly."""
        explaining = [one for one in self.groups if (one.regained or 0) > 0.5 and (one.low or 0) > 0]
        return explaining[0] if len(explaining) == 1 else None

    def conclusion(self) -> str:
        """Return the result in sentences."""
        place = f"{self.run}@{self.iteration}"
        text = (
            f"the update of iteration {self.iteration} of run {self.run} lost {self.benchmark}: {self.before:.4f} "
            f"before, {self.after:.4f} after ({self.after - self.before:+.4f}, 95 % interval {self.low:+.4f} to "
            f"{self.high:+.4f}); versions evaluated between the ends: {self.evaluations}"
        )
        if self.high >= 0 or self.after - self.before > -self.margin:
            text += "; most of the drop came in other updates, so this one alone does not explain it"
        if self.not_made is not None:
            return f"{text}. It cannot be made again without a group: {self.not_made}"
        if not self.groups:
            return text
        one = self.culprit()
        if one is None:
            tried = len(self.groups)
            return f"{text}. No single one of {tried} of its {self.groups_of_update} groups explains the loss"
        return (
            f"{text}. Without group {one.group_id} the score is {one.score:.4f}: {percent(one.regained)} of the loss "
            f"is its doing; `cairn lineage {place}/{one.group_id}/0` shows a sample of it"
        )


def search(good: int, bad: int, lost: Callable[[int], bool]) -> int:
    """Return the first lost version after `good`, if all versions after the first lost one are lost too.

    Calls `lost` for at most ⌈log₂(bad − good)⌉ versions between the ends.
    """
    while bad - good > 1:
        middle = (good + bad) // 2
        if lost(middle):
            bad = middle
        else:
            good = middle
    return bad


@dataclass
class _Evaluations:
    """Results of a benchmark on versions of a run, each evaluated once."""

    store: Store
    run: str
    benchmark: Benchmark | OwnBenchmark
    options: Mapping[str, Any]
    seed: int
    watcher: Watcher
    found: dict[int, tuple[Evaluation, bool]] = field(default_factory=dict)
    """Results by version, and whether they were computed now."""

    def of(self, version: int) -> Evaluation:
        """Return the result on a version. Raises CannotBisect where its weights are no longer there."""
        if version not in self.found:
            place = f"{self.run}@{'initial' if version == INITIAL else version}"
            models = models_of(self.store, place, None, self.options, self.watcher.says)
            try:
                self.found[version] = self.on(models)
            except Retired as error:
                raise CannotBisect(
                    f"the weights of {place} cannot be had any more ({error}): name two versions with --good and "
                    "--bad between which all are retained"
                ) from None
            result, computed = self.found[version]
            self.watcher.says(
                f"{place}: {result.metrics['score']:.4f}" + ("" if computed else ", found in the store, not computed")
            )
        return self.found[version][0]

    def on(self, models: Sequence[ModelFolder]) -> tuple[Evaluation, bool]:
        """Return the result on one model, and whether it was computed now."""
        (one,) = evaluate_models(self.store, models, [self.benchmark], seed=self.seed, watcher=self.watcher)
        return one.result, one.computed


def bisect(
    ledger: Ledger,
    benchmark: Benchmark | OwnBenchmark,
    *,
    good: int | None = None,
    bad: int | None = None,
    drop: float | None = None,
    groups: int = 32,
    options: Mapping[str, Any] | None = None,
    seed: int = SEED,
    watcher: Watcher | None = None,
) -> Bisected:
    """Find the update of a run that lost a benchmark, and the group of it that did it.

    Args:
        good: iteration after which the score was good, INITIAL for the initial weights; by default the version before
            `bad` with the best stored result, or else the initial weights.
        bad: iteration after which it was lost; by default the newest that is published.
        drop: a version has lost the benchmark if its score is lower than the good one's by more than this, and
            significantly lower; by default by half of the difference of the ends.
        groups: largest number of groups without which the update is made again, those with the largest sum of absolute
            advantages first; 0 for none.
        options: engine options of the evaluations that override the run's.

    Raises CannotBisect, and the errors of `models_of` and `evaluate_models`.
    """
    if not ledger.config.samples_responses:
        raise CannotBisect(
            f"run {ledger.run!r} learns from its data and publishes only the weights that it evaluates, so the "
            f"versions between cannot be compared: `cairn export {ledger.run}@ITER FOLDER` writes one, and `cairn eval "
            "--model FOLDER` evaluates it"
        )
    watcher = watcher or Watcher()
    evaluations = _Evaluations(ledger.store, ledger.run, benchmark, options or {}, seed, watcher)
    (newest,) = models_of(ledger.store, ledger.run)
    published = newest.origin["iteration"]
    last = published if bad is None else bad
    for version in (last, *([] if good is None else [good])):
        if version != INITIAL and (version > published or ledger.find(version, Step.SYNC) is None):
            raise CannotBisect(f"run {ledger.run!r} has not published iteration {version}; its newest is {published}")
    if good is not None and good >= last:
        raise CannotBisect(f"--good {good} is not before --bad {last}: there is no update between them")
    after = evaluations.of(last)
    first = _best_before(ledger, last, after) if good is None else good
    before = evaluations.of(first)
    ends = compare(ledger.store, after, before, drop or 0.0)
    if not ends.regressed:
        names = ["initial" if one == INITIAL else str(one) for one in (first, last)]
        raise CannotBisect(
            f"{benchmark.name} has not dropped from {ledger.run}@{names[0]} to @{names[1]}"
            f"{f' by more than {drop:g}' if drop else ''}: {before.metrics['score']:.4f}, then "
            f"{after.metrics['score']:.4f} (95 % interval of the difference {ends.low:+.4f} to {ends.high:+.4f}); name "
            "others with --good and --bad, or ask more with -n"
        )
    margin = -ends.difference / 2 if drop is None else drop
    judged: dict[int, Comparison] = {}

    def lost(version: int) -> bool:
        judged[version] = compare(ledger.store, evaluations.of(version), before, margin)
        return judged[version].regressed

    judged[first], judged[last] = compare(ledger.store, before, before, margin), replace(ends, margin=margin)
    culprit = search(first, last, lost)
    old, new = evaluations.of(culprit - 1), evaluations.of(culprit)
    step = compare(ledger.store, new, old, margin)
    watcher.says(f"iteration {culprit} lost it: {old.metrics['score']:.4f} before, {new.metrics['score']:.4f} after")
    effects: tuple[GroupEffect, ...] = ()
    number_of_groups, not_made = 0, None
    try:
        effects, number_of_groups = _without_groups(ledger, culprit, groups, evaluations)
    except StoreError:
        raise
    except (Failure, BadInput) as error:  # the update is found all the same
        not_made = str(error)
    return Bisected(
        run=ledger.run,
        benchmark=benchmark.name,
        good=None if first == INITIAL else first,
        bad=last,
        margin=margin,
        versions=tuple(
            Version(
                iteration=None if version == INITIAL else version,
                score=evaluations.of(version).metrics["score"],
                difference=one.difference,
                low=one.low,
                high=one.high,
                lost=version == last or one.regressed,
                computed=evaluations.found[version][1],
            )
            for version, one in judged.items()
        ),
        evaluations=len(judged) - 2,
        iteration=culprit,
        before=old.metrics["score"],
        after=new.metrics["score"],
        low=step.low,
        high=step.high,
        groups=effects,
        groups_of_update=number_of_groups,
        not_made=not_made,
    )


def _best_before(ledger: Ledger, bad: int, result: Evaluation) -> int:
    """Return the version before `bad` with the best stored result on the same questions; the initial one if there is
    none."""
    same = (
        one
        for one in results(ledger.store)
        if one.origin.get("run") == ledger.run and questions_digest(one) == questions_digest(result)
    )
    numbers = ((one.metrics["score"], one.origin.get("iteration")) for one in same)
    scores = [(score, version if isinstance(version, int) else INITIAL) for score, version in numbers]
    earlier = [(score, version) for score, version in scores if version < bad]
    return max(earlier, default=(0.0, INITIAL))[1]


# The update, made again without each group.


def without_group(batch: TrainBatch, group: int) -> TrainBatch:
    """Return a batch in which no token of a group is trained on, and in which every other token has its weight."""
    assert batch.groups is not None
    masks = zip(batch.groups, batch.loss_mask, strict=True)
    return replace(
        batch,
        loss_mask=[np.zeros_like(mask) if own == group else mask for own, mask in masks],
        divisor_mask=batch.divisor_mask or batch.loss_mask,
    )


class _Remade(ModelFolder):
    """The weights of an update that was made again, with the tokenizer and configuration of the run's initial model."""

    def __init__(self, base: str, folder: Path, options: EngineOptions, name: str) -> None:
        super().__init__(base, options, name, {"model": name})
        self._folder = folder

    def folder(self) -> str:
        return str(self._folder)


@dataclass(frozen=True)
class _Group:
    id: int
    samples: int
    tokens: int
    weight: float


def _groups_of(batch: TrainBatch) -> list[_Group]:
    """Return the groups with trained tokens, those with the largest sum of absolute advantages first."""
    assert batch.groups is not None
    owners = np.asarray(batch.groups)
    tokens = np.asarray([int(mask.sum()) for mask in batch.loss_mask])
    weights: np.ndarray = tokens.astype(float)
    if batch.advantages is not None:
        pairs = zip(batch.advantages, batch.loss_mask, strict=True)
        weights = np.asarray([float(np.abs(own[mask.astype(bool)]).sum(dtype=np.float64)) for own, mask in pairs])
    entries: np.ndarray = np.arange(len(owners)) if batch.samples is None else np.asarray(batch.samples)
    found = [
        _Group(
            int(group),
            len(np.unique(entries[owners == group])),
            int(tokens[owners == group].sum()),
            float(weights[owners == group].sum()),
        )
        for group in dict.fromkeys(batch.groups)
    ]
    return sorted((one for one in found if one.tokens), key=lambda one: (-one.weight, one.id))


def _without_groups(
    ledger: Ledger, iteration: int, limit: int, evaluations: _Evaluations
) -> tuple[tuple[GroupEffect, ...], int]:
    """Return the effects of at most `limit` groups, the best score first, and the number of all groups with trained
    tokens; none and 0 where `limit` is 0."""
    if not limit:
        return (), 0
    says = evaluations.watcher.says

    def emit(event: Event) -> None:
        if isinstance(event, Message):
            says(event.text)

    before, after = evaluations.of(iteration - 1), evaluations.of(iteration)
    lost = before.metrics["score"] - after.metrics["score"]
    config = recorded_config(ledger)
    options = EngineOptions.of_run(config.rollout, evaluations.options)
    effects: list[GroupEffect] = []
    with tempfile.TemporaryDirectory(prefix="cairn-bisect-") as folder:
        made = ledger.find(iteration, Step.TRAIN)
        with read_only_context(ledger.owner(iteration), emit, trains_only=True, made=made) as run:
            committed = run.committed(iteration, Step.TRAIN)
            require_unredacted(run, committed)
            run = run.seen_as(run.config_of(committed))
            batch = committed_batch(run, committed).reader().whole()
            groups = _groups_of(batch)
            total = sum(one.weight for one in groups)
            written = _update_without(run, committed, batch, groups[:limit], Path(folder), says)
        for group in groups[:limit]:
            result = None
            if group.id in written:
                name = f"{ledger.run}@{iteration} without group {group.id}"
                result, _ = evaluations.on([_Remade(config.model.path, written[group.id], options, name)])
                says(f"{name}: {result.metrics['score']:.4f}")
            gain = None if result is None else compare(ledger.store, result, after)
            effects.append(
                GroupEffect(
                    group_id=group.id,
                    samples=group.samples,
                    tokens=group.tokens,
                    share=group.weight / total if total else 0.0,
                    score=None if result is None else result.metrics["score"],
                    regained=None if gain is None or lost <= 0 else gain.difference / lost,
                    low=None if gain is None else gain.low,
                    high=None if gain is None else gain.high,
                )
            )
    ordered = sorted(effects, key=lambda one: -np.inf if one.score is None else one.score, reverse=True)
    return tuple(ordered), len(groups)


def _update_without(
    run: RunContext,
    committed: Commit,
    batch: TrainBatch,
    groups: Sequence[_Group],
    folder: Path,
    says: Callable[[str], None],
) -> dict[int, Path]:
    """Make a committed update without each of some groups. Return the folders of the models by group, without groups
    whose optimizer step has no other trained token.

    The state before the update is restored once, and saved in `folder` to begin each update from.
    """
    iteration, version = committed.iteration, committed.weight_version_in
    assert version is not None
    training, steps = run.fleet.training, run.config.training.num_steps_per_rollout
    written: dict[int, Path] = {}
    with run.weights_lock:
        restore_trainer(run, run.find(iteration - 1, Step.TRAIN) if iteration else None)
        run.fleet.turns.for_training()
        training.save(str(folder / "state"), "before")
        for place, group in enumerate(groups, 1):
            says(f"update of iteration {iteration} without group {group.id} ({place} of {len(groups)})")
            if place > 1:
                training.load(str(folder / "state"), "before")
            smaller = without_group(batch, group.id)
            if not _trains_in_every_step(smaller, steps):
                continue
            done = training.train(
                smaller,
                num_steps=steps,
                expected_version=version,
                input_digest=f"{committed.digest} without group {group.id}",
                train_actor=run.config.algorithm.trains_actor(iteration),
                update_reference=run.config.algorithm.updates_reference(iteration),
            )
            target = folder / str(group.id)
            target.mkdir()
            training.export_hf(done.weight_version, target)
            if not any(target.iterdir()):
                raise CannotExport(f"the training engine runs on another machine, which does not share {folder}")
            with suppress(FileNotFoundError):
                shutil.rmtree(target / ADAPTER)
            copy_tokenizer(Path(run.config.model.path), target)
            written[group.id] = target
    return written


def _trains_in_every_step(batch: TrainBatch, steps: int) -> bool:
    return all(any(batch.loss_mask[i].any() for i in samples) for samples in split_steps(batch.sample_of, steps))
