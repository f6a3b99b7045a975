"""What `bench.scale` counts is what a run requests, and larger runs follow from smaller ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import driver_load, store_counts
from bench.driver_load import Costs, Size
from bench.scale import search_path

WORK = """
import os, sys
from pathlib import Path
from cairn.storage.opening import open_store

url, folder = sys.argv[1], Path(sys.argv[2])
store, commit = open_store(url), "runs/a/iterations/000001/train.json"
store.write("runs/a/iterations/000001/train/000001-ab/train.parquet", b"x" * 100)
assert store.create(commit, b"x" * 10)
store.list("runs/a/iterations")
store.find("runs/a/leases")
store.read_many([commit] * 3)
(folder / "shard").write_bytes(b"x" * 1000)
store.put_file(folder / "shard", "runs/a/iterations/000001/checkpoint/000001-ab/shard")
if os.fork() == 0:
    open_store(url).delete(commit)
    os._exit(0)
os.wait()
"""

MADE = {
    "PUT snapshot": (1, 100),
    "PUT commit": (1, 10),
    "LIST run": (1, 0),
    "LIST lease": (1, 0),
    "GET commit": (3, 0),
    "PUT checkpoint": (1, 1000),
}


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_requests_of_a_process_and_its_fork_are_counted(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("s3_url") if kind == "s3" else str(tmp_path / "store")
    counts = tmp_path / "counts"
    counts.mkdir()
    with search_path() as path:
        subprocess.run(
            [sys.executable, "-P", "-c", WORK, url, str(tmp_path)],
            env=os.environ | {"PYTHONPATH": path, store_counts.FOLDER: str(counts)},
            check=True,
        )
    _, own = zip(*sorted(store_counts.read(counts).items(), key=lambda one: len(one[1])), strict=True)
    assert own == ({"DELETE commit": (1, 0)}, MADE)


def test_costs_are_found_again_in_loads_that_were_made_with_them() -> None:
    names = ("run", "shard", "engine", "sample", "million tokens")
    each = {figure: dict.fromkeys(reads, 0.0) for figure, reads in driver_load.READS.items()}
    each["CPU seconds"] = dict(zip(names, (0.2, 0.1, 0.03, 0.001, 0.8), strict=True))
    each["requests"] = {"run": 20.0, "shard": 9.0}
    made = Costs(each)
    found = Costs.fitted([(size, made.load(size)) for size in driver_load.SMALL])
    large = Size(256, 64, 4096, 32_768)
    assert found.load(large) == pytest.approx(made.load(large))


def test_a_cost_is_never_negative() -> None:
    loads = [(Size(shards, 1, 16, 64), dict.fromkeys(driver_load.READS, 10.0 - shards)) for shards in (1, 2, 4, 8)]
    assert all(cost >= 0 for own in Costs.fitted(loads).each.values() for cost in own.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_requests_and_calls_of_a_large_run_follow_from_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["bench.driver_load", "--smoke", "--json", str(results)])
    driver_load.main()
    found = {row["figure"]: row for row in json.loads(results.read_text())["compared"]}
    # A shard that finds its engine idle takes a call of its own. Pages' reads fall into any iteration.
    assert found["calls"]["predicted"] == pytest.approx(found["calls"]["measured"], rel=0.25)
    assert found["requests"]["predicted"] == pytest.approx(found["requests"]["measured"], rel=0.25)
