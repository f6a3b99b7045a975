"""All commits of a run, read as one history. See `storage.commits` for the layout and `storage.layout` for every path.

A step is made once: look its commit up with `find`; if there is none, write files into an `attempt` and `commit` them.

A fork has its parent's iterations up to the one it was forked at, and copies nothing: they are read where they lie.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from pydantic import JsonValue, field_validator

from storage import canonical, layout
from storage.commits import SCHEMA_VERSION, Commit, Environment, OutputFile, Record, Step
from storage.errors import BeingDeleted, Damaged, LeaseLost, RunDiffers, StoreError
from storage.leases import Lease
from storage.snapshots import Attempt
from storage.store import Store
from storage.version import CodeVersion, code_version

_REQUESTS = 8
"""Commits read at a time: an object store answers one after tens of milliseconds."""
_PAGE = 1000
"""Names that an object store lists at a time, at most."""


class Parent(Record):
    """Where a run was forked from."""

    run: str
    iteration: int
    """The last iteration that the fork shares with its parent."""

    @field_validator("run")
    @classmethod
    def _stays_in_its_folder(cls, run: str) -> str:
        return layout.check_name(run, "run")


class Manifest(Record):
    """What a run is: frozen when it is created."""

    schema_version: int = SCHEMA_VERSION
    run: str
    config: dict[str, JsonValue]
    inputs: dict[str, str]
    """Digest of everything read from outside the ledger, such as `data` and `model`."""
    code_version: CodeVersion
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
        self._forks: tuple[str, ...] = ()
        """The runs by whose parent this ledger was opened, a fork of it the last."""
        self.lease: Lease | None = None
        """Set by `acquire`; commits need it."""

    @classmethod
    def create(
        cls,
        store: Store,
        run: str,
        config: Mapping[str, Any],
        inputs: Mapping[str, str] | None = None,
        parent: Parent | None = None,
    ) -> "Ledger":
        """Start a run, or open it if it exists with the same configuration and inputs. Raises RunDiffers if it exists
        with others, ValueError if the name is not usable."""
        path = layout.run_manifest(run)
        if not store.exists(path):
            manifest = Manifest(
                run=run,
                config=dict(config),
                inputs=dict(inputs or {}),
                code_version=code_version(),
                parent=parent,
                created_at=time.time(),
            )
            if store.create(path, canonical.seal(manifest.model_dump(mode="json"))):
                return cls(store, manifest)
        return cls.open(store, run, config, inputs)

    @classmethod
    def open(
        cls,
        store: Store,
        run: str,
        config: Mapping[str, Any] | None = None,
        inputs: Mapping[str, str] | None = None,
    ) -> "Ledger":
        """Open a run. Raises FileNotFoundError if there is none, RunDiffers if `config` or `inputs` are given and not
        those recorded, BeingDeleted and Damaged."""
        path = layout.run_manifest(run)
        try:
            data = store.read(path)
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no run {run!r} in {store.url}; `cairn runs` lists them") from None
        try:
            fields = canonical.unseal(data)
            del fields["digest"]
            if "being_deleted_since" in fields:
                raise BeingDeleted(
                    f"run {run!r} is being deleted; if that was interrupted, `cairn delete {run}` goes on"
                )
            manifest = Manifest.model_validate(fields)
            if manifest.run != run:
                raise ValueError(f"it is that of run {manifest.run!r}")
        except ValueError as error:
            raise Damaged(f"manifest {path} cannot be trusted: {error}") from None
        differing = [] if config is None else differences(manifest.config, dict(config))
        if inputs is not None:
            differing += differences(dict(manifest.inputs), dict(inputs), "digest of ")
        if differing:
            raise RunDiffers(run, differing)
        return cls(store, manifest)

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
        and one for each commit."""
        with ThreadPoolExecutor(_REQUESTS) as readers:
            found = [commit for commit in readers.map(self._read, self.markers(iteration)) if commit is not None]
        order = list(Step)
        return sorted(found, key=lambda commit: (order.index(commit.step), commit.shard or ""))

    def markers(self, iteration: int) -> list[str]:
        """Store paths of an iteration's commits, sorted by step and shard as they are spelled."""
        folders = [layout.iteration(run, iteration) for run in self._holders(iteration)]
        found = {name: folder for folder in reversed(folders) for name in self.store.list(folder)}
        return [f"{found[name]}/{name}" for name in sorted(found) if name.endswith(".json")]

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
            if any(name.endswith(".json") for name in names):
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
        numbers = (int(name.removesuffix("/")) for name in self.store.list(layout.iterations(self.run)))
        return [number for number in numbers if number >= self.first_iteration]

    def _newest_folder(self) -> int:
        """The last of the run's own iterations that has files; less than the first if none has. Lists further and
        further ahead and then in the middle, so that most of a long run is passed over."""
        folder, low, high, stride = layout.iterations(self.run), self.first_iteration, None, 0
        names, more = self.store.page(folder, layout.digits(low))
        while more:
            low = int(names[-1].removesuffix("/")) + 1
            if high is None:
                ahead, stride = min(low + stride, layout.LAST_NUMBER), max(_PAGE, 2 * stride)
            else:
                ahead = low + (high - low) // 2 if high - low > _PAGE else low
            found, further = self.store.page(folder, layout.digits(ahead))
            if found:
                names, more = found, further
            else:
                high, more = ahead, ahead > low
        return int(names[-1].removesuffix("/")) if names else self.first_iteration - 1

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


def list_runs(store: Store) -> list[str]:
    """Names of all runs in a store, sorted. What else may lie there is no run."""
    names = [name.removesuffix("/") for name in store.list(layout.runs()) if name.endswith("/")]
    names = [name for name in names if layout.is_name(name)]
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
