"""The manifest of a run: `runs/<run>/run.json`, created once. A run exists as long as its manifest exists."""

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from pydantic import Field, field_validator

from cairn.configs.errors import BadInput
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import require_readable
from cairn.storage.ledger.terms import Terms
from cairn.storage.records import Record
from cairn.storage.store import canonical
from cairn.storage.store.errors import BeingDeleted, LinkOutsideStore, naming_damaged
from cairn.storage.store.store import REQUESTS, Store


class Parent(Record):
    """Origin of a fork."""

    run: str
    iteration: int
    """Last iteration that the fork shares with its parent."""
    reason: str | None = None
    """Reason for the fork, if Cairn made it automatically."""

    @field_validator("run")
    @classmethod
    def _stays_in_its_folder(cls, run: str) -> str:
        return layout.check_name(run, "run")


class Imported(Record):
    """Origin of a run that another trainer made."""

    format: str
    """Name of a format of traces, such as `trl`."""
    source: str
    """Absolute path of the file or folder that is imported."""
    rewards: dict[str, float] = Field(default_factory=dict)
    """Weights of the columns that make the reward, where the user named them."""

    @property
    def described(self) -> str:
        """Format, and the user's choice of rewards."""
        return " ".join([self.format, *(f"--reward {name}={weight:g}" for name, weight in self.rewards.items())])


class WasImported(BadInput):
    """The run was imported, and its traces lack what was requested. The message is one clear sentence."""


class Manifest(Terms):
    """Identity and initial terms of a run, frozen at its creation."""

    id: str | None = None
    """Random id; None if an earlier version created the run."""
    parent: Parent | None = None
    imported: Imported | None = None
    """Origin of an imported run; its `config` says nothing. None if the run was trained here."""
    created_at: float
    """Unix seconds."""

    @property
    def identity(self) -> str:
        """Digest that differs from that of every other run, including a deleted run of the same name."""
        return canonical.digest(self.as_fields())

    def to_bytes(self) -> bytes:
        """Return the content of the manifest's file."""
        return canonical.seal(self.as_fields())

    def require_own(self, needed: str) -> None:
        """Raise WasImported where the run was imported: its traces lack what is `needed`."""
        if self.imported is not None:
            raise WasImported(
                f"run {self.run!r} was imported from {self.imported.source} ({self.imported.format}), which has no "
                f"{needed}; `cairn report`, `show`, `sql`, `rescore` and `whatif` work on it"
            )

    def as_fields(self) -> dict[str, Any]:
        absent = {"imported"} if self.imported is None else set()
        return self.model_dump(mode="json", exclude=absent)


def create_manifest(store: Store, manifest: Manifest) -> bool:
    """Create a run. Returns False if a run of this name exists already."""
    return store.create(layout.run_manifest(manifest.run), manifest.to_bytes())


def read_manifest(store: Store, run: str) -> Manifest:
    """Return the manifest of a run. Raises FileNotFoundError if there is no such run, BeingDeleted and Damaged."""
    path = layout.run_manifest(run)
    try:
        data = store.read(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no run {run!r} in {store.url}; `cairn runs` lists them") from None
    with naming_damaged(f"manifest {path}"):
        fields = canonical.unseal(data)
        if "being_deleted_since" in fields:
            raise BeingDeleted(
                f"run {run!r} is being deleted; if that was interrupted, `cairn delete {run}` resumes it"
            )
        require_readable(fields)
        manifest = Manifest.model_validate(fields)
        if manifest.run != run:
            raise ValueError(f"it belongs to run {manifest.run!r}")
    return manifest


@cache
def _warn_once(sentence: str) -> None:
    logging.getLogger(__name__).warning("%s", sentence)


def warn_skipped(name: str, error: Exception) -> None:
    """Warn once about a folder among the runs that does not hold a run."""
    _warn_once(f"{layout.run(name)} is skipped, as if the run did not exist: {ascii(str(error))[1:-1]}")


def list_runs(store: Store) -> list[str]:
    """Return the names of all runs in a store, sorted.

    Ignores other folders, and logs a warning about a folder that is a link out of the store.
    """

    def exists(name: str) -> bool:
        try:
            return store.exists(layout.run_manifest(name))
        except LinkOutsideStore as error:
            warn_skipped(name, error)
            return False

    names = [name for entry in store.list(layout.RUNS) if (name := layout.parse_run(entry)) is not None]
    with ThreadPoolExecutor(REQUESTS) as pool:
        exist = pool.map(exists, names)
        return [name for name, there in zip(names, exist, strict=True) if there]
