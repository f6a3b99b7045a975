"""Whatever is changed in a run behind its back, `verify` finds and names."""

import json
from collections.abc import Iterator

import pytest
from pydantic import JsonValue

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.publications import VALUE
from cairn.storage.ledger.redacted import Fault, Finding
from cairn.storage.store import canonical
from cairn.storage.store.store import Store
from cairn.storage.upkeep.verification import verify
from tests.storage.builders import CONFIG, commit_step, rollout_table


@pytest.fixture
def ledger(store: Store) -> Ledger:
    """Two iterations of three steps, chained."""
    ledger = Ledger.create(store, "run-1", CONFIG)
    ledger.acquire()
    trained = None
    for iteration in range(2):
        before = () if trained is None else (trained,)
        rollout = commit_step(
            ledger, iteration, Step.ROLLOUT, "00-000", inputs=before, table=rollout_table([iteration])
        )
        reward = commit_step(ledger, iteration, Step.REWARD, "00-000", inputs=(rollout,))
        trained = commit_step(ledger, iteration, Step.TRAIN, inputs=(*before, rollout, reward))
    return ledger


def _findings(ledger: Ledger) -> Iterator[Finding]:
    for verified in verify(ledger):
        yield from verified.findings


def _rollout_file(ledger: Ledger) -> str:
    commit = ledger.find(0, Step.ROLLOUT, "00-000")
    assert commit is not None
    return layout.in_run(ledger.run, commit.outputs[0].path)


def test_an_untouched_run_has_no_findings_and_every_commit_is_read(ledger: Ledger) -> None:
    verified = list(verify(ledger))
    assert [one.findings for one in verified] == [()] * 8
    assert {one.name for one in verified} == {
        "run.json",
        "groups",
        *(f"00000{i}/{step}" for i in (0, 1) for step in ("rollout.00-000", "reward.00-000", "train")),
    }
    files = ledger.store.find(layout.run(ledger.run))
    committed = {path: size for path, size in files.items() if "/leases/" not in path}
    assert sum(one.files for one in verified) == len(committed)
    assert sum(one.bytes for one in verified) == sum(committed.values())


def test_one_changed_byte_of_a_file_is_found(ledger: Ledger) -> None:
    path = _rollout_file(ledger)
    data = ledger.store.read(path)
    ledger.store.write(path, data[:50] + bytes([data[50] ^ 1]) + data[51:])
    (finding,) = _findings(ledger)
    assert (finding.fault, finding.path) == (Fault.ALTERED, path)
    assert "expected" in finding.message
    assert "found" in finding.message


def test_a_missing_file_is_found(ledger: Ledger) -> None:
    ledger.store.delete(path := _rollout_file(ledger))
    (finding,) = _findings(ledger)
    assert (finding.fault, finding.path) == (Fault.MISSING, path)


def test_a_changed_commit_is_found_and_so_is_what_was_made_from_it(ledger: Ledger) -> None:
    path = layout.commit(ledger.run, 0, Step.REWARD, "00-000")
    ledger.store.write(path, ledger.store.read(path).replace(b'"epoch": 1', b'"epoch": 9'))
    assert [(finding.fault, finding.path) for finding in _findings(ledger)] == [
        (Fault.UNREADABLE, path),
        (Fault.INPUT_MISSING, layout.commit(ledger.run, 0, Step.TRAIN)),
    ]


def test_a_forged_commit_breaks_the_chain(ledger: Ledger) -> None:
    path = layout.commit(ledger.run, 0, Step.REWARD, "00-000")
    fields = json.loads(ledger.store.read(path)) | {"values": {"reward": 1.0}}
    del fields["digest"]
    ledger.store.write(path, canonical.seal(fields))
    (finding,) = _findings(ledger)
    assert (finding.fault, finding.path) == (Fault.INPUT_DIFFERS, layout.commit(ledger.run, 0, Step.TRAIN))


@pytest.mark.parametrize(
    "how",
    [
        {"format": 1},
        {"format": 1, "whole_bytes": -1},
        {"format": 1, "whole_bytes": 1, "base": "anything"},
        {"format": 1, "whole_bytes": 1, "base": "-00001/sync"},
        {"format": 1, "whole_bytes": 1, "base": "000001/sync"},
        {"format": 2, "whole_bytes": 1},
    ],
)
def test_a_forged_description_of_stored_weights_is_found(ledger: Ledger, how: dict[str, JsonValue]) -> None:
    synced = commit_step(ledger, 1, Step.SYNC, values={VALUE: how})
    assert [(one.fault, one.path) for one in _findings(ledger)] == [(Fault.INPUT_DIFFERS, synced.path)]


def test_a_deleted_commit_is_found_through_what_was_made_from_it(ledger: Ledger) -> None:
    ledger.store.delete(layout.commit(ledger.run, 0, Step.TRAIN))
    assert {(finding.fault, finding.path) for finding in _findings(ledger)} == {
        (Fault.INPUT_MISSING, layout.commit(ledger.run, 1, Step.ROLLOUT, "00-000")),
        (Fault.INPUT_MISSING, layout.commit(ledger.run, 1, Step.TRAIN)),
    }


def test_a_changed_manifest_is_found(ledger: Ledger) -> None:
    path = layout.run_manifest(ledger.run)
    ledger.store.write(path, ledger.store.read(path).replace(b'"seed": 1', b'"seed": 2'))
    (finding,) = _findings(ledger)
    assert (finding.fault, finding.path) == (Fault.UNREADABLE, path)


def test_a_living_run_has_no_findings_either(ledger: Ledger) -> None:
    reading = verify(ledger)
    seen = [next(reading), next(reading)]
    synced = commit_step(ledger, 0, Step.SYNC)
    commit_step(ledger, 1, Step.SYNC, inputs=(synced,))
    seen += reading
    assert [one.findings for one in seen] == [()] * 8
    assert not list(_findings(ledger))
