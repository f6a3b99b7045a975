"""All commits of a run, read as one history. See `storage.commits` for the layout and `storage.layout` for every path.

A step is made once: look its commit up with `find`; if there is none, write files into an `attempt` and `commit` them.

A fork has its parent's iterations up to the one it was forked at, and copies nothing: they are read where they lie.
"""

import itertools
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from pydantic import BaseModel, field_validator

from storage import canonical, layout
from storage.commits import Commit, Environment, OutputFile, Record, Step, require_readable
from storage.errors import BeingDeleted, Damaged, LeaseLost, RunDiffers, StoreError
from storage.leases import Lease
from storage.snapshots import Attempt
from storage.store import Store
from storage.terms import Rules, Terms, Upgrade, as_read_now, input_differences, plain
from storage.version import code_version

_REQUESTS = 8
"""Commits read at a time: an object store answers one after tens of milliseconds."""
_PAGE = 1000
"""Names that an object store lists at a time, at most."""


class Parent(Record):
    """Where a run was forked from."""

    run: str
    iteration: int
    """The last iteration that the fork shares with its parent."""
    reason: str | None = None
    """Why there is a fork, where Cairn made it by itself."""

    @field_validator("run")
    @classmethod
    def _stays_in_its_folder(cls, run: str) -> str:
        return layout.check_name(run, "run")


class Manifest(Terms):
    """What a run is: frozen when it is created."""

    parent: Parent | None = None
    created_at: float
    """Unix seconds."""


class Ledger:
    """The history of one run. Safe to use from several threads."""

    def __init__(self, store: Store, manifest: Manifest):
        """Use `Ledger.create` or `Ledger.open`."""
        self.store = store
        self.manifest = manifest
        self.run = manifest.run
        self._now: Terms | None = None
        """Those of the code that runs, where it has said what they are."""
        self._committing_under: int | None = None
        self._upgrades: tuple[Upgrade, ...] | None = None
        self._lock = threading.Lock()
        self._forks: tuple[str, ...] = ()
        """The runs by whose parent this ledger was opened, a fork of it the last."""
        self.lease: Lease | None = None
        """Set by `acquire`; commits need it."""

    @classmethod
    def create(
        cls,
        store: Store,
        run: str,
        config: BaseModel | Mapping[str, Any],
        inputs: Mapping[str, str] | None = None,
        parent: Parent | None = None,
        rules: Mapping[str, Rules] | None = None,
    ) -> "Ledger":
        """Start a run, or open it if it exists with the same configuration and inputs: see `open`. Raises RunDiffers if
        it exists with others, ValueError if the name is not usable."""
        path = layout.run_manifest(run)
        if not store.exists(path):
            manifest = Manifest(
                run=run,
                config=plain(config),
                inputs=dict(inputs or {}),
                rules=None if rules is None else dict(rules),
                code_version=code_version(),
                parent=parent,
                created_at=time.time(),
            )
            if store.create(path, canonical.seal(manifest.model_dump(mode="json"))):
                created = cls(store, manifest)
                created._now, created._committing_under, created._upgrades = manifest, 0, ()
                return created
        return cls.open(store, run, config, inputs, rules)

    @classmethod
    def open(
        cls,
        store: Store,
        run: str,
        config: BaseModel | Mapping[str, Any] | None = None,
        inputs: Mapping[str, str] | None = None,
        rules: Mapping[str, Rules] | None = None,
    ) -> "Ledger":
        """Open a run. Raises FileNotFoundError if there is none, RunDiffers if `config` or `inputs` are given and not
        those recorded, BeingDeleted and Damaged.

        What was recorded is read as the code that runs reads it: an option that it knows besides has its default if
        `config` is a model, and an input that it knows besides was not recorded, so it cannot differ. `rules`: what
        its steps read. The first commit records all three, where they are not those of the run so far.
        """
        path = layout.run_manifest(run)
        try:
            data = store.read(path)
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no run {run!r} in {store.url}; `cairn runs` lists them") from None
        try:
            fields = canonical.unseal(data)
            if "being_deleted_since" in fields:
                raise BeingDeleted(
                    f"run {run!r} is being deleted; if that was interrupted, `cairn delete {run}` goes on"
                )
            require_readable(fields)
            del fields["digest"]
            manifest = Manifest.model_validate(fields)
            if manifest.run != run:
                raise ValueError(f"it is that of run {manifest.run!r}")
        except ValueError as error:
            raise Damaged(f"manifest {path} cannot be trusted: {error}") from None
        ledger = cls(store, manifest)
        if config is not None:
            ledger._go_on_under(config, inputs, rules)
        elif inputs is not None and (differing := input_differences(ledger.terms.inputs, inputs)):
            raise RunDiffers(run, differing)
        return ledger

    def _go_on_under(
        self,
        config: BaseModel | Mapping[str, Any],
        inputs: Mapping[str, str] | None,
        rules: Mapping[str, Rules] | None,
    ) -> None:
        recorded = self.terms
        differing = differences(as_read_now(recorded.config, config), plain(config))
        if inputs is not None:
            differing += input_differences(recorded.inputs, inputs)
        if differing:
            raise RunDiffers(self.run, differing)
        self._now = Terms(
            run=self.run,
            config=plain(config),
            inputs=dict(recorded.inputs if inputs is None else inputs),
            rules=recorded.rules if rules is None else dict(rules),
            code_version=code_version(),
        )

    @property
    def upgrades(self) -> tuple[Upgrade, ...]:
        """Terms of the versions of the code that went on with the run after the one that created it, as they were when
        this was first asked for. One request for each, and one. Raises Damaged."""
        if self._upgrades is None:
            self._upgrades = tuple(self._read_upgrades(1))
        return self._upgrades

    @property
    def terms(self) -> Terms:
        """Those that this process has said it goes on under, or else the newest."""
        if self._now is not None:
            return self._now
        return self.upgrades[-1] if self.upgrades else self.manifest

    def terms_of(self, commit: Commit) -> Terms:
        """The terms under which a commit was made, the run's or its parent's. Raises Damaged if they are missing."""
        if commit.run != self.run:
            if self.parent is None:
                raise Damaged(f"commit {commit.name} is of run {commit.run!r}, which is no parent of {self.run!r}")
            return self.parent.terms_of(commit)
        if commit.terms == 0:
            return self.manifest
        if commit.terms > len(self.upgrades):
            self._upgrades = (*self.upgrades, *self._read_upgrades(len(self.upgrades) + 1))
        if commit.terms > len(self.upgrades):
            path = layout.upgrade(self.run, commit.terms)
            raise Damaged(f"{path} is missing, but commit {commit.name} was made under its terms")
        return self.upgrades[commit.terms - 1]

    def _read_upgrades(self, first: int) -> Iterator[Upgrade]:
        for number in itertools.count(first):
            path = layout.upgrade(self.run, number)
            try:
                upgrade = Upgrade.from_bytes(self.store.read(path))
                if (upgrade.run, upgrade.number) != (self.run, number):
                    raise ValueError(f"it says it is number {upgrade.number} of run {upgrade.run!r}")
                yield upgrade
            except FileNotFoundError:
                return
            except ValueError as error:
                raise Damaged(f"{path} cannot be trusted: {error}") from None

    def _record_terms(self, lease: Lease) -> int:
        """The number of the terms that this process commits under, recorded if they are new. Raises LeaseLost."""
        with self._lock:
            while self._committing_under is None:
                recorded = [self.manifest, *self.upgrades]
                number = len(recorded)
                if self._now is None or self._now.same_as(recorded[-1]):
                    self._committing_under = number - 1
                    continue
                fields = self._now.model_dump(mode="json", include=set(Terms.model_fields))
                upgrade = Upgrade(**fields, number=number, epoch=lease.epoch, recorded_at=time.time())
                data = canonical.seal(upgrade.model_dump(mode="json"))
                if self.store.create(layout.upgrade(self.run, number), data, lease.check):
                    self._committing_under = number
                self._upgrades = (*self.upgrades, *self._read_upgrades(number))
            return self._committing_under

    @cached_property
    def parent(self) -> "Ledger | None":
        """The run that this one was forked from. Raises Damaged if that is a run forked from this one."""
        if self.manifest.parent is None:
            return None
        parent = Ledger.open(self.store, self.manifest.parent.run)
        parent._forks = (*self._forks, self.run)
        if parent.run in parent._forks:
            raise Damaged(f"run {parent.run!r} is recorded as forked from itself, over {' and '.join(parent._forks)}")
        return parent

    @property
    def first_iteration(self) -> int:
        """The first iteration that the run makes itself: 0, or the one after those it shares with its parent."""
        return 0 if self.manifest.parent is None else self.manifest.parent.iteration + 1

    def owner(self, iteration: int) -> "Ledger":
        """The ledger that holds an iteration: this one, or that of a parent."""
        return self if self.parent is None or iteration >= self.first_iteration else self.parent.owner(iteration)

    def acquire(self, takeover: bool = False) -> Lease:
        """Own the run, so that commits are allowed. Raises LeaseHeld."""
        self.lease = Lease.acquire(self.store, self.run, takeover)
        return self.lease

    def find(self, iteration: int, step: Step, shard: str | None = None) -> Commit | None:
        """A step's commit, or None. Raises Damaged if its bytes are not those committed. One request, or two for the
        restore point of a fork."""
        for run in self._holders(iteration):
            commit = self._read(layout.commit(run, iteration, step, shard))
            if commit is not None or step is not Step.CHECKPOINT:
                return commit
        return None

    def commits(self, iteration: int) -> list[Commit]:
        """All commits of an iteration, sorted by step (in the order of the DAG) and shard. One request for the list
        and one for each commit. A listing may lag behind: whatever the train step or a listed commit was made from is
        there though it is not listed."""
        with ThreadPoolExecutor(_REQUESTS) as readers:
            read = [commit for commit in readers.map(self._read, self.markers(iteration)) if commit is not None]
        found = {commit.name: commit for commit in read}
        name = layout.commit_name(iteration, Step.TRAIN)
        unlisted = [] if name in found else [name]
        unlisted += [made_from for commit in read for made_from in commit.inputs]
        prefix = layout.commit_name(iteration, "")
        while unlisted:
            name = unlisted.pop()
            if name in found or not name.startswith(prefix):
                continue
            step, _, shard = name.removeprefix(prefix).partition(".")
            commit = self.find(iteration, Step(step), shard or None)
            if commit is not None:
                found[name] = commit
                unlisted += commit.inputs
        order = list(Step)
        return sorted(found.values(), key=lambda commit: (order.index(commit.step), commit.shard or ""))

    def markers(self, iteration: int) -> list[str]:
        """Store paths of an iteration's commits, sorted by step and shard as they are spelled."""
        folders = [layout.iteration(run, iteration) for run in self._holders(iteration)]
        found = {name: folder for folder in reversed(folders) for name in self.store.list(folder)}
        return [f"{found[name]}/{name}" for name in sorted(found) if _is_marker(name)]

    def iterations(self) -> list[int]:
        """Numbers of all iterations that have files, sorted. One request a thousand iterations: the store lists
        folders, not what is in them."""
        shared = [] if self.parent is None else self.parent.iterations()
        return [index for index in shared if index < self.first_iteration] + self._own_iterations()

    def last_iteration(self) -> int | None:
        """The newest iteration with a commit, or None; that of a fresh fork is the last one it shares. The number of
        requests grows with the logarithm of the iterations."""
        for iteration in range(self._newest_folder(), self.first_iteration - 1, -1):
            names = self.store.list(layout.iteration(self.run, iteration))
            if any(map(_is_marker, names)):
                return iteration
        return None if self.manifest.parent is None else self.manifest.parent.iteration

    def attempt(self, iteration: int, step: Step, shard: str | None = None) -> Attempt:
        """A fresh folder for the files of a step. Raises LeaseLost if this driver does not own the run."""
        name = layout.attempt_name(shard, self._held_lease().epoch, uuid.uuid4().hex[:12])
        return Attempt(self.store, self.run, iteration, step, shard, name)

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
    ) -> Commit:
        """Make a snapshot exist: create its commit exclusively. Returns the commit that the ledger now has, which is
        another driver's if that was first (its `attempt` then differs). See `Commit` for the fields.

        Raises LeaseLost, without creating it, if this driver does not own the run any more: it looks before each try.
        """
        lease = self._held_lease()
        commit = Commit(
            run=self.run,
            terms=self._record_terms(lease),
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
        path = layout.commit(self.run, iteration, step, shard)
        if not self.store.create(path, commit.to_bytes(), lease.check):
            first = self._read(path)
            if first is None:
                raise StoreError(f"{path} could not be created, yet it is not there")
            commit = first
        attempt.discard_superseded()
        return commit

    def folder_of(self, commit: Commit) -> str:
        """Store path of the folder in which a commit's files lie."""
        return layout.attempt(commit.run, commit.iteration, commit.step, commit.attempt)

    def _holders(self, iteration: int) -> list[str]:
        """The runs in whose folders an iteration's commits lie. A fork may hold a checkpoint of the last iteration that
        it shares, made because its parent has none there."""
        if self.parent is None or iteration >= self.first_iteration:
            return [self.run]
        shared = self.parent._holders(iteration)
        return [*shared, self.run] if iteration + 1 == self.first_iteration else shared

    def _own_iterations(self) -> list[int]:
        numbers = _numbers(self.store.list(layout.iterations(self.run)))
        return [number for number in numbers if number >= self.first_iteration]

    def _newest_folder(self) -> int:
        """The last of the run's own iterations that has files; less than the first if none has. Lists further and
        further ahead and then in the middle, so that most of a long run is passed over."""
        low, high, stride = self.first_iteration, None, 0
        numbers, more = self._folders_from(low)
        while more and numbers:
            low = numbers[-1] + 1
            if high is None:
                ahead, stride = min(low + stride, layout.LAST_NUMBER), max(_PAGE, 2 * stride)
            else:
                ahead = low + (high - low) // 2 if high - low > _PAGE else low
            found, further = self._folders_from(ahead)
            if found:
                numbers, more = found, further
            else:
                high, more = ahead, ahead > low
        return numbers[-1] if numbers else self.first_iteration - 1

    def _folders_from(self, iteration: int) -> tuple[list[int], bool]:
        """Some of the iterations with files from one on, and whether there are more."""
        names, more = self.store.page(layout.iterations(self.run), layout.digits(iteration))
        return _numbers(names), more

    def _held_lease(self) -> Lease:
        if self.lease is None:
            raise LeaseLost(f"this process does not own run {self.run!r}; acquire its lease first")
        return self.lease

    def _read(self, path: str) -> Commit | None:
        try:
            data = self.store.read(path)
        except FileNotFoundError:
            return None
        return Commit.from_bytes(data, path)


def _is_marker(name: str) -> bool:
    place = layout.parse_commit(name)
    return place is not None and place[0] in set(Step)


def _numbers(names: Sequence[str]) -> list[int]:
    return [number for name in names if (number := layout.parse_iteration(name)) is not None]


def list_runs(store: Store) -> list[str]:
    """Names of all runs in a store, sorted. What else may lie there is no run."""
    names = [name for entry in store.list(layout.runs()) if (name := layout.parse_run(entry)) is not None]
    with ThreadPoolExecutor(_REQUESTS) as pool:
        exist = pool.map(lambda name: store.exists(layout.run_manifest(name)), names)
        return [name for name, there in zip(names, exist, strict=True) if there]


def differences(recorded: Any, given: Any, field: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted fields in which two JSON values differ, with both values; None where one has no such field."""
    if isinstance(recorded, dict) and isinstance(given, dict):
        names = sorted({*recorded, *given})
        prefix = f"{field}." if field and not field.endswith(" ") else field
        return [
            found for name in names for found in differences(recorded.get(name), given.get(name), f"{prefix}{name}")
        ]
    return [] if recorded == given else [(field, recorded, given)]
