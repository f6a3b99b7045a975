"""Retention: removal of older checkpoints and snapshots that the run's configuration does not keep.

```
runs/<run>/retired/000042.checkpoint.json    the files of iteration 42's checkpoint are removed
runs/<run>/retired/000042.weights.json       the weights that its sync step stored are removed
runs/<run>/retired/000042.snapshots.json     the files of all its other steps are removed
```
Commits stay, so the Merkle chain is complete. Markers are created, exclusively, before the first file is removed. What
a crash leaves in between is garbage, which `cairn.storage.upkeep.collector` finds.

Another process may fork the run meanwhile. Each side first records what it is about to do and then checks what the
other side has recorded:

| a fork's manifest appears | the fork | retirement |
|---|---|---|
| before the marker | is made, unless it sees the marker already | sees the fork, deletes the marker |
| between marker and second check | sees the marker: is refused and withdrawn | sees the fork, deletes the marker |
| after the second check | sees the marker: is refused and withdrawn | removes the files |

A crash may leave a marker that should have been deleted. A fork ignores a marker at a shared iteration as long as the
files exist.

| never retired | because |
|---|---|
| the newest checkpoint at or below the oldest weights that are still sampled from | recovery starts there |
| checkpoints and snapshots after it, and earlier ones from which their steps were made | recovery replays these steps |
| snapshots of the last two iterations, and of groups that the newest selection kept or left open | steps read them |
| snapshots of groups that earlier selections kept and that are not trained on yet | steps will read them |
| the newest stored weights, those of open halves, and all that these and retained ones are differences to | readers |
| everything up to the iteration at which another run was forked | the fork reads it here |
| what recovers a pinned iteration: its checkpoint, or the one before and the snapshots since | a person wants it |

A pin may also be set meanwhile. The same table applies: the pin is recorded first and then checks for markers.

So nothing is retired before there is a checkpoint: until then recovery replays the run from its initial weights.
"""

import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cairn.configs.schema.operations import CheckpointConfig
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step, newest_selection
from cairn.storage.ledger.decisions import Decision, Pin, pinned
from cairn.storage.ledger.layout import Kind
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import warn_skipped
from cairn.storage.ledger.publications import chain, stored
from cairn.storage.ledger.redacted import redacted_samples
from cairn.storage.ledger.schemas import Disposition
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.records import Record
from cairn.storage.store import canonical
from cairn.storage.store.errors import BeingDeleted, Damaged, LinkOutsideStore, Redacted, Retired
from cairn.storage.store.store import REQUESTS, Store

_TOGETHER = 8
"""Files that are deleted between two calls of a guard."""
_WAITING = frozenset({Disposition.BUFFER, Disposition.CONTINUE})


class Retirement(Record):
    """Files of one iteration that are to be removed."""

    iteration: int
    kind: Kind
    commits: tuple[str, ...]
    """Names of the commits that lose their files."""
    files: tuple[str, ...]
    """Store paths of the files."""
    bytes: int


def retire(ledger: Ledger, config: CheckpointConfig, *, everything: bool = False) -> list[Retirement]:
    """Remove what the run need not keep, as determined by `due`. Return what was removed.

    Raises LeaseLost if this process was the run's driver and is not any more.
    """
    candidates = list(due(ledger, config, everything=everything))
    marked: set[str] = set()
    for one in candidates:
        fields = {"run": ledger.run, "id": uuid.uuid4().hex, "retired_at": time.time()}
        path = layout.retired(ledger.run, one.iteration, one.kind)
        marker = canonical.seal(fields | one.model_dump(mode="json", exclude={"files"}))
        if ledger.store.create(path, marker, ledger.require_lease):
            marked.add(path)
    shared = shared_with_forks(ledger) if candidates else -1
    wanted = protected_by_pins(ledger, marked=marked) if candidates else set()
    staying = [one for one in candidates if one.iteration <= shared or (one.iteration, one.kind) in wanted]
    for one in staying:
        path = layout.retired(ledger.run, one.iteration, one.kind)
        if path in marked:  # files of another process's marker may be gone
            ledger.require_lease()
            ledger.store.delete(path)
    going = [one for one in candidates if one not in staying]
    remove(ledger.store, [path for one in going for path in one.files], ledger.require_lease)
    return going


def remove(store: Store, paths: Iterable[str], guard: Callable[[], None] = lambda: None) -> None:
    """Delete files of attempts, and the folders that are empty afterwards."""
    paths = list(paths)
    delete_all(store, paths, guard)
    for folder in sorted({layout.attempt_folder(path) for path in paths}):
        store.remove_empty_folders(folder)


def delete_all(store: Store, paths: Iterable[str], guard: Callable[[], None] = lambda: None) -> None:
    """Delete files, eight at a time.

    `guard` is called before each eight; what it raises ends the deletion and propagates.
    """
    paths = list(paths)
    for first in range(0, len(paths), _TOGETHER):
        guard()
        store.delete_many(paths[first : first + _TOGETHER])


def due(ledger: Ledger, config: CheckpointConfig, *, everything: bool = False) -> Iterator[Retirement]:
    """Yield what a run has and need not keep, of its own iterations.

    Goes backwards from the newest iteration to the last that is already retired, or with `everything` to the first.
    """
    if config.retains_everything:
        return
    newest = ledger.last_iteration()
    saved = None if newest is None else newest_checkpoint(ledger, newest - 1 - ledger.lag if ledger.lag else newest)
    if newest is None or saved is None:
        return
    checkpoint = saved.iteration
    first = max(ledger.first_iteration, shared_with_forks(ledger) + 1)
    needed = needed_iterations(ledger, checkpoint, newest)
    needed_by_pins = protected_by_pins(ledger)
    gone = retired(ledger) if everything else set()
    finished: set[Kind] = set()
    bases = _bases_of_newest(ledger, config, newest)
    places = candidates(
        config, newest=newest, checkpoint=checkpoint, needed=needed, first=first, sampled=newest - 1 - ledger.lag
    )
    for iteration, kind in places:
        if kind in finished or (iteration, kind) in gone or (iteration, kind) in needed_by_pins:
            continue
        if kind is Kind.WEIGHTS and (iteration in bases or not ledger.stores_weights):
            continue
        if not everything and ledger.store.exists(layout.retired(ledger.run, iteration, kind)):
            finished.add(kind)
            continue
        commits = [commit for commit in _commits(ledger, iteration, kind) if commit.outputs]
        if commits:
            outputs = [output for commit in commits for output in commit.outputs]
            yield Retirement(
                iteration=iteration,
                kind=kind,
                commits=tuple(commit.name for commit in commits),
                files=tuple(layout.in_run(ledger.run, output.path) for output in outputs),
                bytes=sum(output.bytes for output in outputs),
            )


def candidates(
    config: CheckpointConfig,
    *,
    newest: int,
    checkpoint: int,
    needed: Collection[int],
    first: int,
    sampled: int | None = None,
) -> Iterator[tuple[int, Kind]]:
    """Yield what a run need not keep, from the newest to the oldest, whether it exists or not.

    Args:
        config: the retention policy.
        newest: last iteration with commits.
        checkpoint: iteration of the checkpoint from which recovery starts.
        needed: earlier iterations whose snapshots are still read.
        first: first iteration that may lose anything.
        sampled: oldest iteration whose weights are still sampled from; by default the one before the newest.
    """
    interval = config.save_retain_interval
    if interval is not None:
        for iteration in range(checkpoint - 1, first - 1, -1):  # preempted drivers save anywhere
            if (iteration + 1) % interval != 0:
                yield iteration, Kind.CHECKPOINT
    if config.retain_snapshots is not None:
        for iteration in range(min(checkpoint, newest - max(config.retain_snapshots, 2)), first - 1, -1):
            if iteration not in needed:
                yield iteration, Kind.SNAPSHOTS
    if config.retained_weights is not None:
        oldest = min(newest - 1 if sampled is None else sampled, newest + 1 - config.retained_weights)
        for iteration in range(oldest - 1, first - 1, -1):
            yield iteration, Kind.WEIGHTS


def _bases_of_newest(ledger: Ledger, config: CheckpointConfig, newest: int) -> set[int]:
    """Return the iterations whose weights the newest ones are read from. Every version is a difference to the stored
    one before it, so the oldest of those that stay needs all that the others need."""
    if config.retained_weights is None or not ledger.stores_weights:
        return set()
    oldest = min(newest - 1 - ledger.lag, newest + 1 - config.retained_weights)
    after = (i for i in range(max(0, oldest), newest + 1) if weights_needed(ledger, i))
    before = (i for i in range(min(oldest - 1, newest), -1, -1) if weights_needed(ledger, i))
    found = next(after, None)
    found = next(before, None) if found is None else found
    return set() if found is None else weights_needed(ledger, found)


def weights_needed(ledger: Ledger, iteration: int) -> set[int]:
    """Return the iterations whose stored weights are read for the weights of one, itself included; none where it has
    stored none."""
    synced = ledger.find(iteration, Step.SYNC) if ledger.owner(iteration).stores_weights else None
    if synced is None or stored(synced) is None:
        return set()
    return {commit.iteration for commit in chain(ledger.find, synced)}


def newest_checkpoint(ledger: Ledger, iteration: int, marked: Collection[str] = ()) -> Commit | None:
    """Return the newest checkpoint with files at or below an iteration, of a run or of what it shares, or None.

    Weights of that age are recovered from it. `marked` are store paths of markers whose files still exist.
    """
    while iteration >= 0:
        saved = ledger.find(iteration, Step.CHECKPOINT)
        if saved is not None:
            marker = layout.retired(saved.run, iteration, Kind.CHECKPOINT)
            if marker in marked or not is_retired(ledger, saved):
                return saved
        iteration = _before(ledger, iteration)
    return None


def _before(ledger: Ledger, iteration: int) -> int:
    """Return the newest iteration below one that may have a checkpoint; all between the two have none.

    Checkpoints are made where they are due, by a preempted driver after its last update, and for a fork among the
    iterations that it shares. So none is between two updates of one driver unless it is due there.
    """
    options: Any = ledger.manifest.config.get("checkpoint", {})
    interval = options.get("save_interval", 1)
    due = -1 if interval is None else iteration // interval * interval - 1
    first = max(due + 1, ledger.first_iteration)
    last = ledger.find(iteration, Step.TRAIN) if first < iteration else None
    if last is None:
        return iteration - 1
    epoch = last.epoch

    def is_same_driver(index: int) -> bool:
        trained = ledger.find(index, Step.TRAIN)
        return trained is not None and trained.epoch == epoch

    if is_same_driver(first):
        return first - 1
    return bisect_left(range(first, iteration), True, key=is_same_driver) + first - 1


def needed_iterations(ledger: Ledger, checkpoint: int, newest: int) -> set[int]:
    """Return the iterations whose snapshots must stay.

    These are the iterations from which the steps after a checkpoint were made, those with groups of a selection that is
    not trained on yet, and those with groups that the newest selection trains on or leaves waiting.
    """
    needed: set[int] = set()
    selection = None
    for iteration in range(min(checkpoint + 1, newest - 1), newest + 1):
        commits = ledger.commits(iteration) if iteration >= 0 else []
        if iteration > checkpoint:
            needed |= _input_iterations(commits)
        if (newer := newest_selection(commits)) is None:
            continue
        selection = newer
        if iteration > checkpoint and not any(commit.step is Step.TRAIN for commit in commits):
            needed |= _places_of_groups(ledger, selection, {Disposition.TRAIN})
    if selection is not None:
        needed |= _places_of_groups(ledger, selection, {Disposition.TRAIN, *_WAITING})
    return needed


def protected_by_pins(ledger: Ledger, marked: Collection[str] = ()) -> set[tuple[int, Kind]]:
    """Return what is not retired because an iteration is pinned.

    `marked` are store paths of markers whose files still exist.
    """
    return {
        place
        for iteration in pinned(ledger.decisions.all())
        for place in recovery_needs(ledger, iteration, marked)
        if place[0] >= ledger.first_iteration
    }


def recovery_needs(ledger: Ledger, iteration: int, marked: Collection[str] = ()) -> set[tuple[int, Kind]]:
    """Return what the recovery of an iteration's weights and samples needs.

    This is the newest checkpoint at or below it, the snapshots since then, and those from which their steps were made;
    and the stored weights, where they are not retired.
    """
    saved = newest_checkpoint(ledger, iteration, marked)
    since = -1 if saved is None else saved.iteration
    samples = {iteration, *range(since + 1, iteration + 1)}
    samples |= {i for one in samples for i in _input_iterations(ledger.commits(one))}
    needed = {(i, Kind.SNAPSHOTS) for i in samples}
    weights = weights_needed(ledger, iteration)
    if weights and _stays_stored(ledger, iteration, marked):
        needed |= {(i, Kind.WEIGHTS) for i in weights}
    return needed if saved is None else needed | {(since, Kind.CHECKPOINT)}


def _stays_stored(ledger: Ledger, iteration: int, marked: Collection[str]) -> bool:
    """Return whether the stored weights of an iteration, if there are any, have their files."""
    marker = layout.retired(ledger.owner(iteration).run, iteration, Kind.WEIGHTS)
    return marker in marked or not ledger.store.exists(marker)


def require_restorable(ledger: Ledger, iteration: int, lag: int = 0) -> None:
    """Raise Retired, naming what is gone, unless a fork can continue after the iteration.

    The fork needs a checkpoint of weights as old as those from which it samples with its `lag`, the snapshots since
    then, and the snapshots of groups that wait in the buffer or are unfinished. Raises Redacted if their samples were
    redacted.
    """
    gone = retired(ledger.owner(iteration))
    if not gone and not ledger.owner(iteration).decisions.all():
        return
    saved = newest_checkpoint(ledger, iteration - lag)
    checkpoint = -1 if saved is None else saved.iteration
    at_end = ledger.find(iteration, Step.CHECKPOINT)
    if at_end is not None and is_retired(ledger, at_end):
        raise Retired(f"run {ledger.run!r} cannot be forked at iteration {iteration}: its checkpoint is retired")
    needed = set(range(checkpoint + 1, iteration + 1))
    for since in range(checkpoint + 1, iteration + 1):
        needed |= _input_iterations(ledger.commits(since))
    selection = newest_selection(ledger.commits(iteration))
    if selection is not None and (selection.values["buffered"] or selection.values["unfinished"]):
        needed |= {iteration, *_places_of_groups(ledger, selection, _WAITING)}
    for name, number in redacted_samples(ledger).items():
        if int(name.partition("/")[0]) in needed:
            raise Redacted(
                f"run {ledger.run!r} cannot be forked at iteration {iteration}: that needs {name}, and decision "
                f"{number} redacted samples of it"
            )
    for i in sorted(needed) if gone else ():
        if ledger.store.exists(layout.retired(ledger.owner(i).run, i, Kind.SNAPSHOTS)):
            raise Retired(
                f"run {ledger.run!r} cannot be forked at iteration {iteration}: that needs the snapshots of iteration "
                f"{i}, which are retired"
            )


def is_retired(ledger: Ledger, commit: Commit) -> bool:
    """Return whether the files of a commit of a run or its parents are removed, or about to be removed.

    Makes one request; for a commit that the run shares with its parent, also one for each file.
    """
    store = ledger.store
    if not store.exists(layout.retired(commit.run, commit.iteration, Kind.of(commit.step))):
        return False
    shared = commit.iteration < ledger.first_iteration
    return not shared or not all(store.exists(layout.in_run(commit.run, output.path)) for output in commit.outputs)


def retired(ledger: Ledger) -> set[tuple[int, Kind]]:
    """Return everything that a run has retired. Makes one request for every thousand."""
    names = ledger.store.list(layout.retirements(ledger.run))
    return {place for name in names if (place := layout.parse_retired(name)) is not None}


def forks(store: Store, run: str) -> dict[str, int]:
    """Return the forks of a run, each with the last iteration that it shares with the run.

    Reads the manifests of all runs. Skips, with a warning, a folder without a run of its name (a copy, a link,
    something else), because no driver can continue it.
    """

    def parent(name: str) -> int | None:
        try:
            parent = Ledger.open(store, name).manifest.parent
        except (FileNotFoundError, BeingDeleted):  # no run, or none any more
            return None
        except (Damaged, LinkOutsideStore) as error:
            warn_skipped(name, error)
            return None
        return parent.iteration if parent is not None and parent.run == run else None

    names = [name for entry in store.list(layout.RUNS) if (name := layout.parse_run(entry)) not in (None, run)]
    with ThreadPoolExecutor(REQUESTS) as readers:
        shared = zip(names, readers.map(parent, names), strict=True)
        return {name: iteration for name, iteration in shared if iteration is not None}


def shared_with_forks(ledger: Ledger) -> int:
    """Return the last iteration of a run that a fork reads; -1 without forks."""
    return max(forks(ledger.store, ledger.run).values(), default=-1)


def _commits(ledger: Ledger, iteration: int, kind: Kind) -> list[Commit]:
    if kind is Kind.CHECKPOINT:
        saved = ledger.find(iteration, Step.CHECKPOINT)
        return [] if saved is None else [saved]
    return [commit for commit in ledger.commits(iteration) if Kind.of(commit.step) is kind]


def _input_iterations(commits: Iterable[Commit]) -> set[int]:
    """Return the iterations of the commits with files from which commits were made. A train step has no files."""
    names = (name.partition("/") for commit in commits for name in commit.inputs)
    return {int(iteration) for iteration, slash, step in names if slash and step != Step.TRAIN}


def _places_of_groups(ledger: Ledger, selection: Commit, dispositions: Collection[Disposition]) -> set[int]:
    """Return the iterations that store groups with one of the dispositions."""
    (output,) = selection.outputs
    rows = read_table(ledger.store, selection.run, output, ["iteration", "disposition"]).to_pylist()
    return {row["iteration"] for row in rows if row["disposition"] in dispositions}


# Pins protect an iteration's weights and samples from the run's retention.
#
# A pin is a decision (`cairn.storage.ledger.decisions`), and retention keeps what the pin needs. Both may happen at the
# same time: the pin is recorded first and then checks for retirement markers; retirement creates its markers first and
# then checks for pins. If both see each other, the files stay, and the pin succeeds when it is set again.


def pin(ledger: Ledger, iteration: int, *, by: str | None = None, why: str | None = None) -> Decision:
    """Protect what recovers an iteration, and return the decision.

    Raises ValueError if the run has not made the iteration or shares it with its parent, Retired if a part is gone.
    """
    if iteration < ledger.first_iteration:
        assert ledger.parent is not None
        raise ValueError(
            f"iteration {iteration} of run {ledger.run!r} belongs to {ledger.owner(iteration).run!r}: pin it there"
        )
    if ledger.find(iteration, Step.TRAIN) is None:
        raise ValueError(f"run {ledger.run!r} has not trained iteration {iteration} yet")
    _require_there(ledger, iteration)
    decision = ledger.decisions.record(lambda so_far: Pin(iteration=iteration, kept=True), by=by, why=why)
    try:
        _require_there(ledger, iteration)
    except Retired:
        ledger.decisions.record(lambda so_far: Pin(iteration=iteration, kept=False), by=by, why="it was being retired")
        raise
    return decision


def unpin(ledger: Ledger, iteration: int, *, by: str | None = None, why: str | None = None) -> Decision:
    """Return an iteration to the run's retention. Raises ValueError if it is not pinned."""

    def release(so_far: tuple[Decision, ...]) -> Pin:
        if iteration not in pinned(so_far):
            raise ValueError(f"iteration {iteration} of run {ledger.run!r} is not pinned")
        return Pin(iteration=iteration, kept=False)

    return ledger.decisions.record(release, by=by, why=why)


def _require_there(ledger: Ledger, iteration: int) -> None:
    for i, kind in sorted(recovery_needs(ledger, iteration)):
        if kind is Kind.WEIGHTS:  # recovery does not need them
            continue
        if i >= ledger.first_iteration and ledger.store.exists(layout.retired(ledger.run, i, kind)):
            raise Retired(
                f"iteration {iteration} of run {ledger.run!r} cannot be pinned: that needs the {kind} of iteration "
                f"{i}, which are retired"
            )
