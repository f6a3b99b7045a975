"""What lies among the runs and is none, and files that are deep, huge or no files, stop nobody else."""

import ast
import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from cairn.configs.errors import BadData
from cairn.flows.reading.views import all_runs
from cairn.flows.train import remove_old_files
from cairn.storage import evals
from cairn.storage.ledger.commits import Commit
from cairn.storage.ledger.decisions import read_decision
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.manifest import _warn_once, list_runs
from cairn.storage.ledger.shards import read_commits
from cairn.storage.query.catalogue import rows_of
from cairn.storage.query.database import open_query
from cairn.storage.store import canonical
from cairn.storage.store.canonical import MAX_DEPTH, from_json
from cairn.storage.store.errors import Damaged
from cairn.storage.store.local import LocalStore
from cairn.storage.store.store import LONGEST_RECORD
from cairn.storage.upkeep.collector import delete_run, garbage
from cairn.storage.upkeep.retention import forks, retire
from cairn.tasks.data.files import parsed
from tests.storage.upkeep.test_retention import EVERY_FOURTH, _eleven_iterations
from tests.tables import cases

ROOT = Path(__file__).parents[3]
DEEP = b"[" * 5000 + b"]" * 5000
STRAYS = {
    "torn": lambda folder: _file(folder, b'{"run": "x'),
    "deep": lambda folder: _file(folder, DEEP),
    "huge": lambda folder: os.truncate(_file(folder, b""), LONGEST_RECORD + 1),
    "text": lambda folder: _file(folder, b"\xff\x00 no JSON"),
    "pipe": lambda folder: os.mkfifo(_file(folder, None)),
    "folder": lambda folder: _file(folder, None).mkdir(),
    "empty": lambda folder: folder.mkdir(),
    "copied": lambda folder: shutil.copytree(folder.with_name("run-1"), folder),
    "linked": lambda folder: folder.symlink_to(folder.with_name("run-1")),
    "led out": lambda folder: folder.symlink_to("/"),
}


def _file(folder: Path, data: bytes | None) -> Path:
    folder.mkdir()
    path = folder / "run.json"
    if data is not None:
        path.write_bytes(data)
    return path


@cases("kind", STRAYS)
def test_a_stray_folder_among_the_runs_stops_nobody(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_once.cache_clear()
    caplog.clear()
    store = tmp_path / kind
    ledger = _eleven_iterations(LocalStore(str(store)))
    assert ledger.lease is not None
    STRAYS[kind](store / "runs" / "stray")
    warned: list[str] = []
    run = SimpleNamespace(
        ledger=ledger,
        config=SimpleNamespace(checkpoint=EVERY_FOURTH),
        emit=lambda event: warned.append(event.text),
    )
    remove_old_files(run)  # type: ignore[arg-type]
    assert warned == []
    assert list(garbage(ledger)) is not None
    assert not list(retire(ledger, EVERY_FOURTH)), "the driver has retired what is due"
    assert forks(ledger.store, "run-1") == {}
    assert "run-1" in list_runs(ledger.store)
    assert "run-1" in {status.run for status in all_runs(ledger.store)}
    assert open_query(ledger.store).sql("select count(*) n from runs").to_pylist() == [{"n": 1}]
    ledger.lease.release(Outcome.STOPPED)
    delete_run(ledger.store, "run-1")
    assert "run-1" not in list_runs(ledger.store)
    warnings = [record.getMessage() for record in caplog.records if "runs/stray is skipped" in record.getMessage()]
    assert len(warnings) == (0 if kind in ("pipe", "folder", "empty") else 1), "by its name, once"


READERS: list[Callable[[bytes], object]] = [
    canonical.unseal,
    from_json,
    lambda data: Commit.from_bytes(data, "runs/r/iterations/000000/train.json"),
    lambda data: read_decision(data, "runs/r/decisions/000001.json"),
    lambda data: rows_of(data, "runs/r/iterations/000000/train.json"),
    lambda data: read_commits(data, "runs/r/iterations/000000/shards.000000.json"),
    lambda data: evals.Evaluation.from_bytes(data, "evals/x/result.json"),
]
WRAPPED = ("{deep}", '{{"a": {deep}, "digest": "x"}}', '{{"digest": {deep}}}')


@cases(("reader", "wrapped", "depth"), product(range(len(READERS)), WRAPPED, (MAX_DEPTH + 1, 900, 100_000)))
def test_what_is_nested_too_deeply_is_damage(reader: int, wrapped: str, depth: int) -> None:
    data = wrapped.format(deep="[" * depth + "]" * depth).encode()
    with pytest.raises((ValueError, Damaged)):
        READERS[reader](data)


def test_a_row_of_data_that_is_nested_too_deeply_is_named() -> None:
    with pytest.raises(BadData, match=r"line 7 is not JSON \(it is nested deeper than"):
        parsed(b'{"prompt": ' + DEEP + b"}", "train.jsonl, line 7")


def test_what_a_ledger_holds_is_read_as_deep_as_it_may_be() -> None:
    value: object = 1
    for _ in range(MAX_DEPTH // 2 - 1):
        value = {"a": [value]}
    assert isinstance(value, dict)
    assert canonical.unseal(canonical.seal(value))["a"] == value["a"]


def test_json_of_somebody_else_is_read_in_one_place() -> None:
    """Every other `json.loads` reads Cairn's own words."""
    own = {
        "storage/store/canonical.py": 1,
        "storage/query/database.py": 1,  # DuckDB's
        "configs/catalogue.py": 1,  # a file of the package
        "engines/plan/published.py": 1,  # the same
        "configs/slime.py": 3,  # the same, the config.json of an opened model, and labels, which may be any text
        "engines/models/tokenizers.py": 1,  # the library's
        "engines/agents/tools/worker.py": 1,  # the driver's
        "engines/rollout/sglang/installation.py": 1,
        "engines/rollout/sglang/start_router.py": 1,
        "engines/agents/environments/verifiers.py": 1,
        "engines/fleet/warm.py": 1,
    }
    found: dict[str, int] = {}
    for folder in ("configs", "storage", "tasks", "engines", "flows"):
        for file in (ROOT / folder).rglob("*.py"):
            name = str(file.relative_to(ROOT))
            if name.startswith(("tasks/rewards/", "tasks/grading/")):  # each a version of its own
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                read = ast.unparse(node) if isinstance(node, ast.Call) else ""
                if read.startswith("json.loads(") and not read.startswith("json.loads(json.dumps("):
                    found[name] = found.get(name, 0) + 1
    assert found == own
