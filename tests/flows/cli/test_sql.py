"""`cairn sql`: what it prints, for people and for machines, and how it refuses; `cairn.open` in Python."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import cairn as package
from cairn.flows.cli import app
from cairn.flows.reading.opened import OpenedStore
from cairn.storage.opening import open_for_runs
from cairn.storage.query.views import VIEWS
from cairn.storage.store.errors import StoreRefused
from tests.flows.written_runs import new_run, write_run

ROOT = Path(package.__file__).parent.parent


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("store"))
    write_run(new_run(folder), 2)
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def cairn(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sql", *arguments])


def test_machines_get_every_value_as_json_and_as_csv(store: str) -> None:
    text = (
        "SELECT name, metrics, timings, committed_at, weight_version_in FROM steps WHERE step = 'train' ORDER BY name"
    )
    rows = json.loads(cairn(text, "--json", "--store", store).stdout)
    assert [(row["name"], row["metrics"]["loss"], row["timings"]) for row in rows] == [
        ("000000/train", 0.1, {}),
        ("000001/train", 0.1, {}),
    ]
    read = list(csv.DictReader(io.StringIO(cairn(text, "--csv", "--store", store).stdout)))
    assert [json.loads(row["metrics"]) for row in read] == [row["metrics"] for row in rows]
    assert [row["committed_at"] for row in read] == [row["committed_at"] for row in rows]
    assert [row["weight_version_in"] for row in read] == ["0", "1"]


def test_numbers_that_json_is_without_are_text(store: str) -> None:
    (row,) = json.loads(cairn("SELECT 'nan'::DOUBLE AS x, 1.5 AS y, sum(1) AS z", "--json", "--store", store).stdout)
    assert row == {"x": "nan", "y": 1.5, "z": 1}


def test_people_get_a_table_and_are_told_what_it_leaves_out(store: str) -> None:
    lines = cairn(
        "SELECT iteration, reward FROM rewards ORDER BY 1", "--limit", "2", "--store", store
    ).stdout.splitlines()
    assert [line.split() for line in lines[:2]] == [["iteration", "reward"], ["0", "1"]]
    assert lines[-1] == "2 of 12 rows; --limit shows more"


def test_a_row_that_is_too_wide_is_shown_a_line_a_column(store: str) -> None:
    lines = cairn("SELECT * FROM samples WHERE sample_index = 1", "--limit", "1", "--store", store).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list(VIEWS["samples"].columns)
    (response,) = [line for line in lines if line.startswith("response ")]
    assert response.endswith(r"5 \x1b[31m[bold]\x7f\x9b31m")  # nothing in a sample steers the terminal


def test_the_schema_is_every_view_with_its_columns(store: str) -> None:
    schema = json.loads(cairn("--schema", "--json").stdout)
    assert {name: list(view["columns"]) for name, view in schema.items()} == {
        name: list(view.columns) for name, view in VIEWS.items()
    }
    assert "log_prob" in cairn("--schema").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["SELECT rewrd FROM rewards"], "did you mean 'reward'?"),
        (["SELECT 1 FROM sampels"], "did you mean 'samples'?"),
        (["DROP TABLE samples"], "only SELECT reads the ledger"),
        (["SELECT 1", "--run", "toi"], "there is no run 'toi'"),
        (["SELECT 1", "--json", "--csv"], "not both"),
        ([], "pass a query"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(store: str, arguments: list[str], message: str) -> None:
    result = cairn(*arguments, "--store", store)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_python_opens_a_store_and_asks_the_same(store: str) -> None:
    opened = package.open(store)
    table = opened.sql(
        "SELECT iteration, avg(reward) AS reward FROM rewards WHERE run = $run GROUP BY 1", {"run": "toy"}
    )
    assert sorted(table.column("iteration").to_pylist()) == [0, 1]
    with pytest.raises(package.BadQuery, match="did you mean 'samples'"):
        opened.sql("SELECT 1 FROM sampels")


def test_every_view_is_an_attribute_of_an_opened_store(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAIRN_STORE", store)
    opened = package.open()
    assert OpenedStore.__annotations__.keys() == VIEWS.keys() <= {*dir(opened)}
    assert {"open", "Trajectory", "tool"} <= {*dir(package)}
    assert opened.rewards.arrow("iteration = $at", {"at": 1}).num_rows == 6
    assert opened.steps.arrow().column("metrics").to_pylist()
    assert "iteration: BIGINT" in repr(opened.samples)


@pytest.mark.slow
def test_a_type_checker_knows_what_a_store_holds(store: str, tmp_path: Path) -> None:
    user, folders = tmp_path / "user.py", tmp_path / "folders" / "cairn"
    user.write_text("import cairn\nreveal_type(cairn.open('x').samples)\nreveal_type(cairn.Trajectory)\n")
    folders.mkdir(parents=True)
    for name in ("cairn/__init__.py", "flows", "tasks", "engines", "storage", "configs"):  # as `make types` does
        (folders / Path(name).name).symlink_to(ROOT / name)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--ignore-missing-imports", user],
        env=os.environ | {"MYPYPATH": str(folders.parent)}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert "cairn.flows.reading.opened.ViewOf" in checked.stdout, checked.stdout
    assert "cairn.engines.types.trajectories.Trajectory" in checked.stdout


def test_a_store_that_is_one_level_off_is_named(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "above").mkdir()
    (tmp_path / "above" / "store").symlink_to(store)
    for wrong, sentence in (
        (f"{store}/runs", f"{store}/runs is inside a store; did you mean the folder above, {store}?"),
        (f"{store}/runs/toy", f"{store}/runs/toy is inside a store; did you mean the folder above, {store}?"),
        (f"{tmp_path}/above", f"{tmp_path}/above is not a store; did you mean the folder store in it?"),
        (f"{tmp_path}/none", f"there is no folder {tmp_path}/none; a store is the folder that contains runs/"),
    ):
        with pytest.raises(StoreRefused) as refused:
            package.open(wrong)
        assert str(refused.value) == sentence
        monkeypatch.setenv("CAIRN_STORE", wrong)
        result = CliRunner().invoke(app, ["runs"])
        assert (result.exit_code, result.stderr) == (2, f"{sentence}\n")
    with pytest.raises(StoreRefused, match=r"is not a store: it contains no runs/"):
        package.open(tmp_path)
    with pytest.raises(StoreRefused, match="did you mean the folder above"):
        open_for_runs(f"{store}/runs")


def test_neither_torch_nor_ray_nor_prefect_is_imported_for_a_query(store: str) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from cairn.flows.cli import app;"
        f"r = CliRunner().invoke(app, ['sql', 'SELECT count(*) FROM samples', '--store', {store!r}]);"
        "print(r.exit_code, [m for m in ('torch', 'ray', 'prefect', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "0 []"
