"""A fork that comes in the way of retirement or deletion of its parent is whole, or leaves nothing behind."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cairn.flows.history.fork import fork
from cairn.storage.ledger import layout
from cairn.storage.ledger.layout import Kind
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import list_runs
from cairn.storage.store import canonical
from cairn.storage.store.errors import BeingDeleted, Retired, SharedWithForks
from cairn.storage.store.local import LocalStore
from cairn.storage.upkeep.collector import delete_run
from cairn.storage.upkeep.retention import forks
from tests.flows.test_upgrades import FIXTURE


class InterruptedStore(LocalStore):
    """Lets someone else act right before or after the manifest of a fork is created."""

    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None

    def create(self, path: str, data: bytes, guard: Callable[[], None] = lambda: None) -> bool:
        interesting = path == layout.run_manifest("new")
        if interesting and self.before:
            self.before()
        created = super().create(path, data, guard)
        if interesting and self.after:
            self.after()
        return created


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A run with a checkpoint of iteration 1, and one fork less than in the fixture."""
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "runs" / "branch")
    monkeypatch.chdir(tmp_path)
    return Ledger.open(InterruptedStore(str(tmp_path)), "parent")


def retire_checkpoint(parent: Ledger) -> None:
    """As the parent's driver does, up to the first removal."""
    parent.store.create(layout.retired("parent", 1, Kind.CHECKPOINT), canonical.seal({"run": "parent"}))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_fork_refused_by_retirement_leaves_nothing_that_pins_its_parent(parent: Ledger, moment: str) -> None:
    setattr(parent.store, moment, lambda: retire_checkpoint(parent))
    with pytest.raises(Retired, match="its checkpoint is retired"):
        fork(parent, 1, "new")
    assert list_runs(parent.store) == ["parent"]
    assert forks(parent.store, "parent") == {}
    assert parent.store.find(layout.run("new")) == {}


def test_a_fork_whose_parent_was_deleted_meanwhile_leaves_no_orphan(parent: Ledger) -> None:
    Path(parent.store.url, layout.leases("parent"), "000001.json").unlink()  # its driver has long been gone
    parent.store.before = lambda: delete_run(parent.store, "parent")  # type: ignore[attr-defined]
    with pytest.raises(FileNotFoundError, match="no run 'parent'"):
        fork(parent, 1, "new")
    assert list_runs(parent.store) == []


def test_a_fork_whose_parent_is_being_deleted_is_withdrawn(parent: Ledger) -> None:
    note = canonical.seal({"run": "parent", "being_deleted_since": 1.0})
    parent.store.after = lambda: parent.store.write(layout.run_manifest("parent"), note)  # type: ignore[attr-defined]
    with pytest.raises(BeingDeleted):
        fork(parent, 1, "new")
    assert parent.store.find(layout.run("new")) == {}


def test_a_parent_is_not_deleted_once_its_fork_is_there(parent: Ledger) -> None:
    fork(parent, 1, "new")
    with pytest.raises(SharedWithForks):
        delete_run(parent.store, "parent")
