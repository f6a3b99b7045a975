"""Redaction: the text and the tokens of a prompt's samples are removed from a run's tables, and the ledger records it.

The rows stay, with rewards, counts and all other values that are not text. So the record of what was drawn, trained on
and scored remains. Commits stay unchanged, too. A decision (`cairn.storage.ledger.decisions`) names each table with its
committed digest and its new digest, and readers accept either.

| order | a crash right after it leaves |
|---|---|
| check that nothing needs the samples any more | the run as it was |
| record the decision | unchanged tables; `cairn verify` reports an unfinished redaction |
| delete graders' answers about the prompt from `answers/` | the same; graders are called again if needed |
| replace tables one by one: tables made from samples first, the samples last | some of each; the same |
| delete what interrupted attempts left of the same iterations | the run redacted |

Calling it again finishes the rest. A table without the prompt's text is not touched again.

| refused because the samples are needed | needed by |
|---|---|
| of iterations after the checkpoint from which recovery starts, and samples waiting to be trained on | the driver |
| the same of a run that was forked from this one | the fork's driver |
| samples in write-ahead parts of an open shard | the shard |
| samples from which a pinned iteration without a checkpoint is recovered | the person who pinned it |

Shared samples are redacted in the run that made them, and its forks read the redacted tables. Weights cannot forget;
the decision records which weights were trained on the samples.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cairn.storage import evals
from cairn.storage.ledger import layout
from cairn.storage.ledger import snapshots as tables
from cairn.storage.ledger.commits import Commit, OutputFile, Step, parse_commit_name
from cairn.storage.ledger.decisions import Decision, RedactedFile, Redaction, pinned, redacted_files
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.redacted import redact_rows
from cairn.storage.ledger.schemas import IMAGES
from cairn.storage.ledger.snapshots import read_bytes
from cairn.storage.logs.answers import forget
from cairn.storage.logs.call_log import groups_of_calls, is_calls
from cairn.storage.logs.sample_log import prompts_in_stream, waiting_prompts
from cairn.storage.store.errors import Retired
from cairn.storage.upkeep.collector import collect, garbage
from cairn.storage.upkeep.retention import forks, needed_iterations, newest_checkpoint, recovery_needs

_ORDER = (Step.EVAL, Step.ADVANTAGE, Step.SCORE, Step.REWARD, Step.ROLLOUT)
"""Order in which tables are replaced. Evaluations are found by the prompt's text, which the rollouts hold, so rollouts
are last."""


@dataclass(frozen=True)
class PromptData:
    """Data of a run that belong to a prompt."""

    prompt: int
    samples: int
    """Number of samples that the run generated itself."""
    files: tuple[RedactedFile, ...]
    """The run's own tables with text or tokens of these samples, in the order of replacement."""
    iterations: frozenset[int]
    """Iterations with such tables, without those of evaluations, which are not read again."""
    trained_in: tuple[int, ...]
    weight_versions: tuple[int, ...]
    owners: tuple[str, ...]
    """Other runs whose shared iterations hold samples of the prompt."""
    seen: "_Seen"


def redact(
    ledger: Ledger,
    prompt: int,
    *,
    by: str | None = None,
    why: str | None = None,
    progress: Callable[[str], None] = lambda sentence: None,
    on_remaining: Callable[[str], None] = lambda sentence: None,
) -> Decision:
    """Redact the samples of a prompt, or finish an interrupted redaction. Return the decision.

    Raises ValueError if there is nothing to do or if the samples are needed; then nothing is changed.

    Args:
        ledger: the run.
        prompt: row of the data set.
        by: author of the decision; the process's user by default.
        why: reason for the decision.
        progress: called with a sentence about each step.
        on_remaining: called with a sentence about each result of an evaluation, and about running episodes, that may
            hold the same text and are not changed.
    """
    affected = find(ledger, prompt, progress)
    decision = _unfinished_decision(ledger, affected)
    if decision is None:
        require_unneeded(ledger, affected)
        decision = ledger.decisions.record(lambda so_far: _decision(ledger, affected, so_far), by=by, why=why)
    require_unneeded(ledger, affected)  # somebody may have forked the run or pinned something before it was recorded
    for sentence in _unreached(ledger, affected.seen):
        on_remaining(sentence)
    forget(ledger.store, affected.seen.texts)
    for number, file in enumerate(affected.files):
        progress(f"{number} of {len(affected.files)} tables redacted, next: the table of {file.commit}")
        _replace(ledger, file, affected)
    assert isinstance(decision.what, Redaction)
    touched = {_iteration_of(ledger, layout.in_run(ledger.run, file.path)) for file in decision.what.files}
    collect(ledger, [one for one in garbage(ledger) if _iteration_of(ledger, one.path) in touched])
    return decision


def _decision(ledger: Ledger, affected: PromptData, so_far: tuple[Decision, ...]) -> Redaction:
    """Return the redaction to record.

    Raises ValueError if a table differs from what the redactions so far leave: the replacement would then match neither
    these nor this one.
    """
    earlier = redacted_files(so_far)
    for file in affected.files:
        for decision, before in earlier.get(file.path, ())[-1:]:
            if file.old_sha256 != before.new_sha256:
                raise ValueError(
                    f"{layout.in_run(ledger.run, file.path)} is being redacted by decision {decision.number} of "
                    f"{decision.by}: run the command again when that is done"
                )
    return Redaction(
        prompt=affected.prompt,
        samples=affected.samples,
        files=affected.files,
        trained_in=affected.trained_in,
        weight_versions=affected.weight_versions,
    )


def find(ledger: Ledger, prompt: int, progress: Callable[[str], None] = lambda sentence: None) -> PromptData:
    """Return what a run holds of a prompt's text and tokens. Reads the samples of all iterations that still have
    them."""
    seen = _Seen()
    for commit, output in _tables(ledger, {Step.ROLLOUT}):
        if output not in commit.tables:
            continue
        progress(f"looking for prompt {prompt} in {commit.name}")
        if (data := _read(ledger, commit, output)) is not None:
            table = tables.from_parquet(data)
            seen.committed |= set(table.column("group_id").to_pylist())
            seen.note(ledger, commit, table.filter(pc.equal(table.column("prompt_index"), prompt)))
    changed: dict[Step, list[RedactedFile]] = {step: [] for step in _ORDER}
    iterations, trained = set(), set()
    for commit, output in _tables(ledger, set(_ORDER)) if seen.groups else ():
        progress(f"looking at {commit.name}")
        if commit.run != ledger.run or (data := _read(ledger, commit, output)) is None:
            continue
        new, holds_some = _bytes_without(ledger, data, commit, output, prompt, seen)
        if commit.step is Step.ADVANTAGE and holds_some:
            trained.add(commit.iteration)
        if new is not data:
            changed[commit.step].append(
                RedactedFile(
                    commit=commit.name,
                    path=output.path,
                    old_bytes=len(data),
                    old_sha256=hashlib.sha256(data).hexdigest(),
                    new_bytes=len(new),
                    new_sha256=hashlib.sha256(new).hexdigest(),
                )
            )
            iterations |= set() if commit.step is Step.EVAL else {commit.iteration}
    updates = [trained_by for i in sorted(trained) if (trained_by := ledger.find(i, Step.TRAIN)) is not None]
    return PromptData(
        prompt=prompt,
        samples=seen.own_samples,
        files=tuple(file for step in _ORDER for file in changed[step]),
        iterations=frozenset(iterations),
        trained_in=tuple(sorted(trained)),
        weight_versions=tuple(update.weight_version_out or 0 for update in updates),
        owners=tuple(sorted(seen.owners)),
        seen=seen,
    )


def require_unneeded(ledger: Ledger, affected: PromptData) -> None:
    """Raise ValueError, saying what needs them, unless a prompt's samples can be removed."""
    place = f"prompt {affected.prompt} of run {ledger.run!r} cannot be redacted"
    newest = ledger.last_iteration() or 0
    for iteration in range(max(0, newest - ledger.lag), newest + ledger.lag + 2):
        done = {commit.shard for commit in ledger.commits(iteration) if commit.step is Step.ROLLOUT}
        if affected.prompt in waiting_prompts(ledger.store, ledger.run, iteration, done):
            raise ValueError(f"{place} yet: samples of it are being generated in iteration {iteration}")
    if affected.prompt in prompts_in_stream(ledger.store, ledger.run):
        raise ValueError(f"{place} yet: it has samples that no iteration has taken; run the command again later")
    for one in _with_forks(ledger):
        clash = sorted(affected.iterations & _needed_for_recovery(one))
        if clash:
            raise ValueError(
                f"{place} yet: run {one.run!r} needs its samples of iteration {clash[-1]} to recover, as no later "
                f"checkpoint covers them; resume that run until its next checkpoint, or do not fork from there"
            )
    for pin in pinned(ledger.decisions.all()):
        saved = newest_checkpoint(ledger, pin)
        needed = {i for i, kind in recovery_needs(ledger, pin) if kind is layout.Kind.SNAPSHOTS}
        if (saved is None or saved.iteration < pin) and (clash := sorted(affected.iterations & needed)):
            raise ValueError(
                f"{place}: iteration {pin} is pinned, and its weights are recomputed from samples of iteration "
                f"{clash[-1]}; run cairn unpin {ledger.run}@{pin}"
            )


def _unreached(ledger: Ledger, seen: "_Seen") -> Iterator[str]:
    """Yield a sentence about each place where text of a prompt may remain."""
    for folder in evals.results_with_prompts(ledger.store, seen.texts):
        yield f"the evaluation result in {folder} holds the same text: remove that folder, and evaluate again"
    for folder in sorted(
        {path.rpartition("/")[0] for path in ledger.store.find(layout.run(ledger.run)) if is_calls(path)}
    ):
        paths = [f"{folder}/{name}" for name in ledger.store.list(folder)]
        if groups_of_calls(ledger.store, paths) - seen.committed:
            yield (
                f"calls in {folder} belong to unfinished episodes and do not name their prompt: run the command again "
                "when these are committed"
            )


@dataclass
class _Seen:
    """Data of the rollouts that belong to a prompt."""

    groups: set[int] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)
    own_samples: int = 0
    committed: set[int] = field(default_factory=set)
    """All groups in committed rollouts."""

    def note(self, ledger: Ledger, commit: Commit, rows: pa.Table) -> None:
        self.groups |= set(rows.column("group_id").to_pylist())
        self.texts |= set(rows.column("prompt_text").to_pylist()) - {""}
        if commit.run == ledger.run:
            self.own_samples += rows.num_rows
        elif rows.num_rows:
            self.owners.add(commit.run)


def _tables(ledger: Ledger, steps: set[Step]) -> Iterator[tuple[Commit, OutputFile]]:
    for iteration in ledger.iterations():
        for commit in ledger.commits(iteration):
            if commit.step in steps:
                yield from ((commit, output) for output in commit.outputs)


def _read(ledger: Ledger, commit: Commit, output: OutputFile) -> bytes | None:
    """Return the content of a file, or None if retention has removed it."""
    try:
        return read_bytes(ledger.store, commit.run, output)
    except Retired:
        return None


def _rows(step: Step, table: pa.Table, prompt: int, seen: _Seen) -> pa.Array:
    """Return a mask of the prompt's rows."""
    if step is Step.ROLLOUT and "prompt_index" in table.column_names:
        mask = pc.equal(table.column("prompt_index"), prompt)
    elif step is Step.EVAL:
        mask = pc.is_in(table.column("prompt_text"), pa.array(sorted(seen.texts), pa.string()))
    else:
        mask = pc.is_in(table.column("group_id"), pa.array(sorted(seen.groups), pa.int64()))
    return mask.combine_chunks()


def _bytes_without(
    ledger: Ledger, data: bytes, commit: Commit, output: OutputFile, prompt: int, seen: _Seen
) -> tuple[bytes, bool]:
    """Return a table's file without the prompt's text, and whether any rows belong to the prompt.

    Returns `data` itself if there is no text to remove. Images and long results of calls are removed if no other
    prompt's samples have them.
    """
    table = tables.from_parquet(data)
    if output in (commit.images, commit.side_file(layout.RESULTS_FILE)):
        is_image = output == commit.images
        used_elsewhere = (
            _images_of_others(ledger, commit, prompt) if is_image else _results_of_others(ledger, commit, seen)
        )
        left = table.filter(pc.is_in(table.column("sha256"), pa.array(sorted(used_elsewhere), pa.string())))
        return (data if left.num_rows == table.num_rows else tables.to_parquet(left)), False
    rows = _rows(commit.step, table, prompt, seen)
    emptied = redact_rows(table, rows)
    return (data if emptied.equals(table) else tables.to_parquet(emptied)), bool(pc.any(rows).as_py())


def _images_of_others(ledger: Ledger, commit: Commit, prompt: int) -> set[str]:
    """Return the SHA-256 of the images in a rollout that other prompts have."""
    data = _read(ledger, commit, commit.table)
    assert data is not None  # a commit's files retire together
    samples = tables.from_parquet(data)
    others = samples.filter(pc.not_equal(samples.column("prompt_index"), prompt))
    return {image["sha256"] for images in others.column(IMAGES.name).to_pylist() for image in images or ()}


def _results_of_others(ledger: Ledger, commit: Commit, seen: _Seen) -> set[str]:
    """Return the SHA-256 of the long results in a rollout that calls of other prompts' samples received."""
    output = commit.side_file(layout.CALLS_FILE)
    data = None if output is None else _read(ledger, commit, output)
    assert data is not None  # a commit's files retire together, and long results belong to calls
    calls = tables.from_parquet(data)
    others = calls.filter(pc.invert(pc.is_in(calls.column("group_id"), pa.array(sorted(seen.groups), pa.int64()))))
    return set(others.column("result_digest").drop_null().to_pylist())


def _replace(ledger: Ledger, file: RedactedFile, affected: PromptData) -> None:
    commit = ledger.find(*parse_commit_name(file.commit))
    assert commit is not None
    (output,) = (output for output in commit.outputs if output.path == file.path)
    before = read_bytes(ledger.store, ledger.run, output)
    data, _ = _bytes_without(ledger, before, commit, output, affected.prompt, affected.seen)
    ledger.store.write(layout.in_run(ledger.run, file.path), data)


def _unfinished_decision(ledger: Ledger, affected: PromptData) -> Decision | None:
    """Return the decision that covers what is left, or None.

    Raises ValueError if there is nothing to do, or if another prompt's redaction must be finished first.
    """
    decisions = ledger.decisions.all()
    own: Decision | None = None
    for path, versions in redacted_files(decisions).items():
        decision, file = versions[-1]
        assert isinstance(decision.what, Redaction)
        if decision.what.prompt == affected.prompt:
            continue
        if _sha256(ledger, path) == file.old_sha256:
            raise ValueError(
                f"the redaction of prompt {decision.what.prompt} is not finished: run cairn delete {ledger.run} "
                f"--prompt {decision.what.prompt} first"
            )
    for decision in decisions:
        if isinstance(decision.what, Redaction) and decision.what.prompt == affected.prompt:
            made = {(file.path, file.new_sha256) for file in decision.what.files}
            own = decision if {(file.path, file.new_sha256) for file in affected.files} <= made else None
    if own is None and not affected.files:
        elsewhere = f"; {', '.join(affected.owners)} holds the shared ones" if affected.owners else ""
        raise ValueError(f"run {ledger.run!r} holds no text of prompt {affected.prompt} in its own samples{elsewhere}")
    return own


def _sha256(ledger: Ledger, path: str) -> str | None:
    """Return the SHA-256 of a file; None if it is retired."""
    try:
        return ledger.store.sha256(layout.in_run(ledger.run, path))[1]
    except FileNotFoundError:
        return None


def _with_forks(ledger: Ledger) -> Iterator[Ledger]:
    """Yield the run and all its forks, recursively."""
    yield ledger
    for name in forks(ledger.store, ledger.run):
        yield from _with_forks(Ledger.open(ledger.store, name))


def _needed_for_recovery(ledger: Ledger) -> set[int]:
    """Return the iterations whose samples a driver may still read, to train on them or to recover weights."""
    newest = ledger.last_iteration()
    if newest is None:
        return set()
    rollout: Any = ledger.manifest.config.get("rollout", {})
    over = newest + 1 >= rollout.get("num_rollout", newest + 2) and ledger.find(newest, Step.SYNC) is not None
    behind = newest - 1 - ledger.lag if ledger.lag and not over else newest
    saved = newest_checkpoint(ledger, behind)
    checkpoint = -1 if saved is None else saved.iteration
    if over and checkpoint == newest:
        return set()
    return {*range(checkpoint + 1, newest + 1)} | needed_iterations(ledger, checkpoint, newest)


def _iteration_of(ledger: Ledger, path: str) -> int | None:
    place = layout.parse_file(ledger.run, path)
    return None if place is None else place[0]
