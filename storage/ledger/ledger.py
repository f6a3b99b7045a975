"""The ledger: all commits of a run as one history. `cairn.storage.ledger.commits` describes the format of commits and
`cairn.storage.ledger.layout` every path.

A step is made once. Look its commit up with `find`. If there is none, write files into an `attempt` and `commit` them.

A fork shares its parent's iterations up to the iteration at which it was forked. Nothing is copied: the fork reads them
from the parent's folder.
"""

import threading
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from cairn.configs.schema.rollout import lag_of
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, OutputFile, Step
from cairn.storage.ledger.decisions import Decisions
from cairn.storage.ledger.leases import Lease
from cairn.storage.ledger.manifest import Imported, Manifest, Parent, create_manifest, read_manifest
from cairn.storage.ledger.shards import SHARED, RecentRecords
from cairn.storage.ledger.snapshots import Attempt, discard_superseded
from cairn.storage.ledger.terms import Rules, RunTerms, Terms, Upgrade, input_differences, plain
from cairn.storage.records import Environment, code_version
from cairn.storage.store.errors import Damaged, LeaseLost, RunDiffers, StoreError
from cairn.storage.store.store import REQUESTS, Store

if TYPE_CHECKING:
    from cairn.configs.schema.run import RunConfig

# Iterations of a run that have files. Only the folders are listed, not their contents.


_PAGE = 1000
"""Greatest number of names in one page of an object store's listing."""


def iterations_with_files(store: Store, run: str) -> list[int]:
    """Return all iterations that have files, sorted. Makes one request for every thousand."""
    return _numbers(store.list(layout.iterations(run)))


def newest_iteration_with_files(store: Store, run: str, first: int) -> int:
    """Return the last iteration with files from `first` on; less than `first` if there is none.

    Lists further and further ahead and then bisects, so that the number of requests grows with the logarithm of the
    iterations.
    """
    low, high, stride = first, None, 0
    numbers, more = _page(store, run, low)
    while more and numbers:
        low = numbers[-1] + 1
        if high is None:
            ahead, stride = min(low + stride, layout.LAST_NUMBER), max(_PAGE, 2 * stride)
        else:
            ahead = low + (high - low) // 2 if high - low > _PAGE else low
        later, further = _page(store, run, ahead)
        if later:
            numbers, more = later, further
        else:
            high, more = ahead, ahead > low
    return numbers[-1] if numbers else first - 1


def _page(store: Store, run: str, first: int) -> tuple[list[int], bool]:
    """Return the first iterations from `first` on, and whether there are more."""
    names, more = store.page(layout.iterations(run), layout.digits(first))
    return _numbers(names), more


def _numbers(names: Sequence[str]) -> list[int]:
    return [number for name in names if (number := layout.parse_iteration(name)) is not None]


_STEPS = frozenset(Step)


class Ledger:
    """The history of one run. Safe to use from several threads."""

    def __init__(self, store: Store, manifest: Manifest):
        """Do not call this directly; use `Ledger.create` or `Ledger.open`."""
        self.store = store
        self.manifest = manifest
        self.run = manifest.run
        self._terms = RunTerms(store, manifest)
        self.decisions = Decisions(store, manifest)
        """Decisions about this run, without those about its parents."""
        self._forks: tuple[str, ...] = ()
        """Runs through whose `parent` this ledger was opened; the last one is a fork of this run."""
        self.lease: Lease | None = None
        """Lease on the run, set by `acquire`. Commits need it."""
        self._records = RecentRecords(store)
        self._newest: int | None = None
        """The newest iteration with a commit when this process, which owns the run, looked."""
        self._committed = -1
        """The newest iteration of which this process has made a commit."""
        self._noting = threading.Lock()

    @classmethod
    def create(
        cls,
        store: Store,
        run: str,
        config: BaseModel | Mapping[str, Any],
        inputs: Mapping[str, str] | None = None,
        parent: Parent | None = None,
        rules: Mapping[str, Rules] | None = None,
        imported: Imported | None = None,
        changing: Collection[str] = (),
    ) -> "Ledger":
        """Create a run, or open it if it exists with the same configuration and inputs (see `open`).

        Raises RunDiffers if it exists with others, ValueError if the name is not usable.
        """
        if not store.exists(layout.run_manifest(run)):
            manifest = Manifest(
                run=run,
                id=uuid.uuid4().hex,
                config=plain(config),
                inputs=dict(inputs or {}),
                rules=dict(rules or {}),
                code_version=code_version(),
                parent=parent,
                imported=imported,
                created_at=time.time(),
            )
            if create_manifest(store, manifest):
                created = cls(store, manifest)
                created._terms.begin()
                return created
        return cls.open(store, run, config, inputs, rules, changing)

    @classmethod
    def open(
        cls,
        store: Store,
        run: str,
        config: BaseModel | Mapping[str, Any] | None = None,
        inputs: Mapping[str, str] | None = None,
        rules: Mapping[str, Rules] | None = None,
        changing: Collection[str] = (),
    ) -> "Ledger":
        """Open a run.

        Raises FileNotFoundError if there is no such run, RunDiffers if `config` or `inputs` differ from the recorded
        ones, WasImported if there is a `config` and the run was imported, BeingDeleted and Damaged.

        Recorded values are read in the terms of the running code: if `config` is a model, an option that the recorded
        configuration lacks has its default; an input that was not recorded cannot differ. The first commit records
        `config`, `inputs` and `rules` if they differ from those of the run so far.

        Args:
            config: configuration to compare with the recorded one.
            inputs: digests of the inputs to compare with the recorded ones.
            rules: what the steps read.
            changing: options of `config` that may differ from the recorded ones, and replace them from the next commit
                on.
        """
        ledger = cls(store, read_manifest(store, run))
        if config is not None:
            ledger.manifest.require_own("weights and no configuration to continue with")
            ledger._terms.declare(config, inputs, rules, changing)
        elif inputs is not None and (differing := input_differences(ledger.terms.inputs, inputs)):
            raise RunDiffers(run, differing)
        return ledger

    @property
    def upgrades(self) -> tuple[Upgrade, ...]:
        """Terms of the later versions of the code and layouts (`RunTerms.upgrades`)."""
        return self._terms.upgrades

    @property
    def terms(self) -> Terms:
        """Terms under which this process continues the run; the newest recorded ones if it has not declared any."""
        return self._terms.now

    def reread_terms(self) -> None:
        """Read terms that a driver has recorded since they were read: for a ledger that stays open beside it."""
        self._terms.reread()

    def terms_of(self, commit: Commit) -> Terms:
        """Return the terms under which a commit of the run or its parent was made. Raises Damaged if they are
        missing."""
        if commit.run != self.run:
            if self.parent is None:
                raise Damaged(
                    f"commit {commit.name} belongs to run {commit.run!r}, which is not a parent of {self.run!r}"
                )
            return self.parent.terms_of(commit)
        terms = self._terms.numbered(commit.terms)
        if terms is None:
            path = layout.upgrade(self.run, commit.terms)
            raise Damaged(f"{path} is missing, but commit {commit.name} was made under its terms")
        return terms

    @property
    def config(self) -> "RunConfig":
        """Configuration with which the run goes on, for reading only. Raises ConfigError."""
        return self.terms.read_config

    def config_of(self, *commits: Commit) -> "RunConfig":
        """Return the configuration under which a commit of the run or its parent was made, for reading only; of several
        commits of an iteration the newest one. Commits of a run that went on in another layout have several, which
        differ in that alone. Raises Damaged and ConfigError."""
        return self.terms_of(max(commits, key=attrgetter("terms"))).read_config

    def config_under(self, epoch: int) -> "RunConfig":
        """Return the configuration under which the driver with this epoch worked, for reading only."""
        recorded = [upgrade for upgrade in self.upgrades if upgrade.epoch <= epoch]
        return (recorded[-1] if recorded else self.manifest).read_config

    @cached_property
    def parent(self) -> "Ledger | None":
        """Run from which this one was forked. Raises Damaged if that run is itself a fork of this one."""
        if self.manifest.parent is None:
            return None
        parent = Ledger.open(self.store, self.manifest.parent.run)
        parent._forks = (*self._forks, self.run)
        if parent.run in parent._forks:
            raise Damaged(
                f"run {parent.run!r} is recorded as forked from itself, through {' and '.join(parent._forks)}"
            )
        return parent

    @property
    def first_iteration(self) -> int:
        """First iteration that the run makes itself: 0, or the one after those shared with its parent."""
        return 0 if self.manifest.parent is None else self.manifest.parent.iteration + 1

    @property
    def lag(self) -> int:
        """Number of open iterations besides the newest. Their samples are generated while its weights are trained."""
        rollout: Any = self.manifest.config.get("rollout", {})
        return lag_of(rollout.get("pipeline", "sync"), rollout.get("lag"), rollout.get("max_age"))

    @property
    def stores_weights(self) -> bool:
        """Whether sync steps store the weights that they publish. Runs that a version without this option created do
        not."""
        checkpoint: Any = self.manifest.config.get("checkpoint", {})
        return checkpoint.get("store_weights", False) is not False

    def owner(self, iteration: int) -> "Ledger":
        """Return the ledger that holds an iteration: this one or a parent's."""
        return self if self.parent is None or iteration >= self.first_iteration else self.parent.owner(iteration)

    def acquire(self, takeover: bool = False) -> Lease:
        """Own the run, so that this process may commit. Raises LeaseHeld."""
        self.lease = Lease.acquire(self.store, self.run, takeover)
        self._records.look_again()
        self._newest = None
        return self.lease

    def require_lease(self) -> None:
        """Check the ownership. Call it before every change of the run other than a commit. Makes two requests.

        Raises LeaseLost if this process has owned the run and does not any more. A process that never owned it, such as
        a collector, passes: it only cleans up.
        """
        if self.lease is not None:
            self.lease.check()

    def find(self, iteration: int, step: Step, shard: str | None = None) -> Commit | None:
        """Return a step's commit, or None. Makes one request, or two for the restore point of a fork; for a shard, one
        more for each record that was not read before.

        The owner of the run reads the records of an iteration once: nobody else makes any, and a record that a driver
        made before it was taken over is found when this one creates the record of that number. Raises Damaged if the
        bytes are not those that were committed.
        """
        for run in self._runs_with_commits_of(iteration):
            commit = self._find(run, iteration, step, shard)
            if commit is not None or step is not Step.CHECKPOINT:
                return commit
        return None

    def _find(self, run: str, iteration: int, step: Step, shard: str | None) -> Commit | None:
        if step in SHARED:
            owned = self.lease is not None and run == self.run
            records = self._records.of(run, iteration)
            commit = records.find(step, shard, owned=owned)
            if commit is not None or records.has_records_only(owned=owned):
                return commit
        return self._read(layout.commit(run, iteration, step, shard))

    def commits(self, iteration: int) -> list[Commit]:
        """Return all commits of an iteration, sorted by step (in the order of the DAG) and shard.

        Makes one request for the list and one for each file of commits. A listing may lag behind. So commits from which
        the train step or a listed commit was made are included even if they are not listed.
        """
        listed: dict[str, list[int]] = {}
        paths = []
        for path in self.markers(iteration):
            number = layout.parse_record(path.rpartition("/")[2])
            if number is None:
                paths.append(path)
            else:
                listed.setdefault(layout.run_of(path), []).append(number)
        with ThreadPoolExecutor(REQUESTS) as readers:
            read = [commit for commit in readers.map(self._read, paths) if commit is not None]
        read += [one for run, numbers in listed.items() for one in self._records.of(run, iteration).all(numbers)]
        commits = {commit.name: commit for commit in read}
        unlisted = [layout.commit_name(iteration, Step.TRAIN)]
        unlisted += [made_from for commit in read for made_from in commit.inputs]
        prefix = layout.commit_name(iteration, "")
        while unlisted:
            name = unlisted.pop()
            if name in commits or not name.startswith(prefix):
                continue
            step, _, shard = name.removeprefix(prefix).partition(".")
            commit = self.find(iteration, Step(step), shard or None)
            if commit is not None:
                commits[name] = commit
                unlisted += commit.inputs
        order = list(Step)
        return sorted(commits.values(), key=lambda commit: (order.index(commit.step), commit.shard or ""))

    def markers(self, iteration: int) -> list[str]:
        """Return the store paths of an iteration's files of commits, sorted by their names."""
        folders = [layout.iteration(run, iteration) for run in self._runs_with_commits_of(iteration)]
        folder_of = {name: folder for folder in reversed(folders) for name in self.store.list(folder)}
        return [f"{folder_of[name]}/{name}" for name in sorted(folder_of) if is_marker(name)]

    def iterations(self) -> list[int]:
        """Return the numbers of all iterations that have files, sorted.

        Makes one request for every thousand iterations: the store lists folders, not their contents.
        """
        shared = [] if self.parent is None else self.parent.iterations()
        own = iterations_with_files(self.store, self.run)
        first = self.first_iteration
        return [index for index in shared if index < first] + [index for index in own if index >= first]

    def last_iteration(self) -> int | None:
        """Return the newest iteration with a commit, or None. For a fresh fork that is the last shared iteration.

        The number of requests grows with the logarithm of the iterations. The run's owner makes two, once: its
        predecessor has left a place to begin, and nobody else makes commits.
        """
        newest = self._newest if self._newest is not None else self._last_iteration()
        if self.lease is None or newest is None:
            return newest
        self._newest = newest
        return max(newest, self._committed)

    def _last_iteration(self) -> int | None:
        first = self.first_iteration
        begin = max(first, (self.lease and self.lease.iteration) or first)
        newest = newest_iteration_with_files(self.store, self.run, begin)
        if newest < begin and first < begin:
            newest = newest_iteration_with_files(self.store, self.run, first)
        for iteration in range(newest, first - 1, -1):
            names = self.store.list(layout.iteration(self.run, iteration))
            if any(map(is_marker, names)):
                if self.lease is not None:
                    self._records.of(self.run, iteration).look(names)  # the owner will look there next
                return iteration
        return None if self.manifest.parent is None else self.manifest.parent.iteration

    def attempt(self, iteration: int, step: Step, shard: str | None = None) -> Attempt:
        """Return a fresh folder for the files of a step. Raises LeaseLost if this driver no longer owns the run."""
        name = layout.attempt_name(shard, self._own_lease().epoch, uuid.uuid4().hex[:12])
        return Attempt(self.store, self.run, iteration, step, shard, name)

    def running(self, iteration: int) -> AbstractContextManager[None]:
        """Count a shard of an iteration as running: commits with `shared` may wait for its own, which shares their
        record."""
        return self._records.of(self.run, iteration).recorder.running()

    def commit(
        self,
        *,
        iteration: int,
        step: Step,
        shard: str | None,
        attempt: Attempt,
        inputs: Mapping[str, str],
        config_digest: str,
        environment: Environment,
        started_at: float,
        outputs: Sequence[OutputFile] = (),
        weight_version_in: int | None = None,
        weight_version_out: int | None = None,
        state_digest: str | None = None,
        values: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        timings: Mapping[str, float] | None = None,
        shared: bool = False,
    ) -> Commit:
        """Commit a snapshot: create its marker exclusively. `Commit` describes the fields.

        Returns the commit that the ledger now has. If another driver was first, that is its commit, with another
        `attempt`. With `shared` the commit, of a shard, is in a record together with others that are ready
        (`cairn.storage.ledger.shards`).

        Raises LeaseLost, without creating the commit, if this driver no longer owns the run; it checks before each try.
        """
        lease = self._own_lease()
        commit = Commit(
            run=self.run,
            terms=self._terms.record(lease),
            iteration=iteration,
            step=step,
            shard=shard,
            attempt=attempt.name,
            epoch=lease.epoch,
            inputs=dict(inputs),
            config_digest=config_digest,
            outputs=tuple(outputs),
            weight_version_in=weight_version_in,
            weight_version_out=weight_version_out,
            state_digest=state_digest,
            values=dict(values or {}),
            metrics=dict(metrics or {}),
            timings=dict(timings or {}),
            started_at=started_at,
            committed_at=time.time(),
            environment=environment,
        )
        lease.iteration = max(iteration, lease.iteration or 0)
        commit = self._commit(commit, attempt, lease, shared=shared)
        with self._noting:
            self._committed = max(iteration, self._committed)
        return commit

    def _commit(self, commit: Commit, attempt: Attempt, lease: Lease, *, shared: bool) -> Commit:
        if shared:
            return self._records.of(self.run, commit.iteration).recorder.commit(commit, attempt, lease.check)
        if commit.step in SHARED:
            self._records.of(self.run, commit.iteration).has_others = True
        if not self.store.create(commit.path, commit.to_bytes(), lease.check):
            first = self._read(commit.path)
            if first is None:
                raise StoreError(f"{commit.path} could not be created, but it does not exist either")
            commit = first
        discard_superseded([attempt])
        return commit

    def folder_of(self, commit: Commit) -> str:
        """Return the store path of the folder with a commit's files."""
        return layout.attempt(commit.run, commit.iteration, commit.step, commit.attempt)

    def _runs_with_commits_of(self, iteration: int) -> list[str]:
        """Return the runs whose folders hold commits of an iteration.

        A fork may hold checkpoints of the last iterations that it shares, made because its parent has none there.
        """
        if self.parent is None or iteration >= self.first_iteration:
            return [self.run]
        shared = self.parent._runs_with_commits_of(iteration)
        return [*shared, self.run] if iteration + 1 + self.lag >= self.first_iteration else shared

    def _own_lease(self) -> Lease:
        if self.lease is None:
            raise LeaseLost(f"this process does not own run {self.run!r}; acquire its lease first")
        return self.lease

    def _read(self, path: str) -> Commit | None:
        try:
            data = self.store.read(path)
        except FileNotFoundError:
            return None
        return Commit.from_bytes(data, path)


def is_marker(name: str) -> bool:
    """Return whether an entry of an iteration's folder is a file of commits."""
    place = layout.parse_commit(name)
    return (place is not None and place[0] in _STEPS) or layout.parse_record(name) is not None
