"""Step `sync`: publish the new weights. Every rollout engine fetches them when it needs them.

An engine's weights are verified, not remembered: before it generates, it is queried, and only an engine that is behind
is updated.

Where the run stores its weights, training and generation wait only while they are copied:

    learn of i      train ─▶ publish, copy
    then of i+1                        │   collect …  ─▶ first commit of i+1+lag
    sync of i                          └─▶ compress, upload ─▶ commit ─┘

No iteration after the open ones is committed before that, so a driver that resumes finds the step missing and makes it
from the restored trainer. Engines that read the weights from the store wait for the commit, and so do evaluations,
whose results name it.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from cairn.engines.types.errors import PublicationGone, WeightsDiffer
from cairn.engines.types.types import Publication
from cairn.engines.weights.layout import is_whole
from cairn.storage.ledger.commits import Commit, OutputFile, Step
from cairn.storage.ledger.publications import VALUE, Stored, stored
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.step import Outcome, StepCall, durable
from cairn.tasks.durable.versions import version_of
from cairn.tasks.trainer.checkpoint import copies_of
from cairn.tasks.trainer.recovery import restore_trainer
from cairn.tasks.trainer.stored_weights import has_weights, stored_versions

LONGEST_CHAIN = 0.5
"""Whole weights are stored once the differences since the last ones exceed this share of their size. So a version takes
at most about 1.5 times as long to read as whole weights."""


@dataclass(frozen=True)
class LastStored:
    """The last sync step whose weights this driver had stored."""

    iteration: int


@dataclass(frozen=True)
class CopiedWeights:
    """The last weights that the ranks have copied for a sync step."""

    publication: Publication
    base: Commit | None
    """The sync step to which the difference is written; None for whole weights."""


@durable(Step.SYNC, reads=("rollout.dtype",), engines=("training",))  # the digest is of the weights in that dtype
def sync(step: StepCall, trained: Commit) -> Outcome:
    """Publish the weights that `trained` committed, and commit the digest that engines must find, with the weights
    themselves where the run stores them."""
    run, values, files, timings = step.run, dict[str, Any](), list[OutputFile](), dict[str, float]()
    began = time.perf_counter()
    with run.weights_lock:
        copied = _copied(run, version_of(trained))
        if copied is not None:
            publication = copied.publication
        elif run.fleet.weights.reads_store:  # engines read what is stored here
            restore_trainer(run, trained)
            publication = run.fleet.weights.measure(version_of(trained))
        else:
            publication = publish(run, trained)
        if run.ledger.stores_weights and copied is None:
            copied = _copy(step, publication)
    ended = time.perf_counter()
    if copies_of(run).made(Step.SYNC, step.iteration):
        timings["copy"] = ended - began
    if copied is not None:
        files, how = _store(step, copied)
        values[VALUE] = how.model_dump(exclude_none=True)
        timings["store"] = time.perf_counter() - ended
    return Outcome(
        files=files,
        values={"digest": publication.digest, **values},
        timings=timings,
        weight_version_in=trained.weight_version_out,
        weight_version_out=trained.weight_version_out,
    )


def goes_on(run: RunContext) -> bool:
    """Return whether iterations go on while a sync step stores the weights that it has published."""
    return run.ledger.stores_weights and not run.fleet.weights.reads_store


def _copied(run: RunContext, version: int) -> CopiedWeights | None:
    """Return the copy that an earlier try has made of these weights, if the ranks still hold it: the engine may have
    trained on since. Return None without one."""
    copied = run.attached(CopiedWeights)
    if copied is None or copied.publication.version != version:
        return None
    return copied if run.fleet.training.holds_version(version, copied.publication.digest) else None


def _copy(step: StepCall, publication: Publication) -> CopiedWeights:
    """Copy the published weights, to be written as the difference to the last stored ones, if the trainer still has
    these. They are whole with a checkpoint, and once all differences since the last whole ones are larger than
    `LONGEST_CHAIN` of these."""
    run, last = step.run, step.run.attached(LastStored)
    base = None if last is None else run.find(last.iteration, Step.SYNC)
    before = None if base is None else stored(base)
    due = copies_of(run).newest == step.iteration or run.find(step.iteration, Step.CHECKPOINT) is not None
    if before is None or due or before.difference_bytes > LONGEST_CHAIN * before.whole_bytes:
        base = None
    digest = None if base is None else str(base.values["digest"])
    run.fleet.training.copy_version(publication.version, run.config.rollout.dtype, publication.digest, digest)
    run.attach(copied := CopiedWeights(publication, base))
    return copied


def _store(step: StepCall, copied: CopiedWeights) -> tuple[list[OutputFile], Stored]:
    """Write the copied weights. They are whole where the ranks had not kept the last stored ones."""
    attempt, base = step.attempt, copied.base
    written = step.run.fleet.training.write_version(attempt.store.url, attempt.folder)
    step.run.attach(LastStored(step.iteration))
    files, size = [attempt.adopt(file) for file in written], sum(file.bytes for file in written)
    before = None if base is None else stored(base)
    if base is None or before is None or is_whole(written):
        return files, Stored(whole_bytes=size)
    return files, Stored(
        base=base.name,
        base_digest=base.digest,
        differences=before.differences + 1,
        whole_bytes=before.whole_bytes,
        difference_bytes=before.difference_bytes + size,
    )


def publish(run: RunContext, weights: Commit | None) -> Publication:
    """Publish the weights that `weights` committed; None means the initial ones. A trainer in another state is restored
    to these weights first, unless engines read them from the run's store."""
    if (stored := _announce(run, weights)) is not None:
        return stored
    with run.weights_lock:
        restore_trainer(run, weights)
        return run.fleet.weights.publish(version_of(weights), keep=run.ledger.lag + 2)


def _announce(run: RunContext, weights: Commit | None) -> Publication | None:
    """Publish weights that the run's store has. Return None where engines do not read it, or it does not have them."""
    if weights is None or not run.fleet.weights.reads_store:
        return None
    synced = run.find(weights.iteration, Step.SYNC)
    if synced is None or not has_weights(run.ledger, synced):
        return None
    versions, version = stored_versions(run.find, synced), version_of(weights)
    run.fleet.weights.announce(version, run.ledger.store.url, versions, keep=run.ledger.lag + 2)
    return Publication(version, versions[-1].digest)


def _ensure_announced(run: RunContext, weights: Commit | None) -> None:
    if run.fleet.weights.reads_store and version_of(weights) not in run.fleet.weights.published():
        _announce(run, weights)


def update(run: RunContext, engine: Any, weights: Commit | None) -> float:
    """Update an engine of `run.fleet.rollout` during generation to the weights that `weights` committed. Return the
    seconds without decoding. Raises EngineError."""
    _ensure_announced(run, weights)
    seconds: float = run.fleet.weights.update(engine, version_of(weights))
    return seconds


def serve(
    run: RunContext,
    engine: Any,
    weights: Commit | None,
    beside: Collection[Any] = (),
    *,
    checked_within: float = 0.0,
) -> None:
    """Have an engine of `run.fleet.rollout` serve the weights that `weights` committed, and those `beside` it that are
    to serve them next, where they are idle: all of them are sent the weights at once. `checked_within`: see
    `cairn.engines.fleet.weights.exchange`.

    The weights are published again if the engine needs them and their publication is gone, was not yet made by this
    driver, or differs from what was published. Raises PublicationGone where another half learns meanwhile: the training
    engine is ahead, and does not go back.
    """
    version = version_of(weights)
    _ensure_announced(run, weights)
    try:
        run.fleet.weights.serve(engine, version, beside, checked_within=checked_within)
    except (PublicationGone, WeightsDiffer) as error:
        if run.side_by_side:
            why = "is not published any more" if isinstance(error, PublicationGone) else f"was dropped ({error})"
            raise PublicationGone(
                f"weight version {version} {why}, and the training engine is ahead of it: run `cairn resume` to "
                "publish it again"
            ) from error
        with run.weights_lock:  # another thread may have published it meanwhile
            if version not in run.fleet.weights.published():
                publish(run, weights)
        run.fleet.weights.serve(engine, version, beside)
