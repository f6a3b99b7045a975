"""SQL over the ledger: what the views say, what they leave out, and what a query cannot do."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import Parent
from cairn.storage.opening import open_store
from cairn.storage.query.database import Query, open_query
from cairn.storage.query.views import VIEWS
from cairn.storage.store.errors import BadQuery
from cairn.storage.store.store import Store
from tests.flows.written_runs import new_run, write_iteration, write_run
from tests.s3 import S3Server, use_server


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of indices, empty for each test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with `toy` of three iterations and `branch`, forked after its second and one iteration longer."""
    folder = tmp_path_factory.mktemp("store")
    toy = new_run(str(folder))
    write_run(toy, 3)
    branch = Ledger.create(
        toy.store, "branch", toy.manifest.config, toy.manifest.inputs, Parent(run="toy", iteration=1),
        toy.manifest.rules,
    )  # fmt: skip
    branch.acquire()
    write_iteration(branch, 2)
    return folder


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Store:
    """A copy of the store, to be damaged."""
    shutil.copytree(written, tmp_path / "store")
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def query(written: Path) -> Query:
    return open_query(open_store(str(written)))


def rows(query: Query, text: str, *params: object) -> list[tuple]:
    found = query.sql(text, params or None)
    return list(zip(*(column.to_pylist() for column in found.columns), strict=True))


MEANS = "SELECT iteration, avg(reward) FROM samples WHERE run = 'toy' GROUP BY 1 ORDER BY 1"


def test_samples_carry_what_later_steps_made_of_them(query: Query) -> None:
    columns = "disposition, reason, trained_in, advantage, response_tokens, weight_version"
    found = rows(query, f"SELECT group_id % 3, sample_index, reward, {columns} FROM samples WHERE run = 'toy' "
                 "AND iteration = 2 ORDER BY 1, 2")  # fmt: skip
    assert found == [
        (0, 0, 1, "train", None, 2, 1, 2, 2),
        (0, 1, 0, "train", None, 2, -1, 2, 2),
        (1, 0, 1, "train", None, 2, 1, 3, 2),
        (1, 1, 0, "train", None, 2, -1, 3, 2),
        (2, 0, 1, "drop", "zero_std_1", None, None, 4, 2),
        (2, 1, 1, "drop", "zero_std_1", None, None, 4, 2),
    ]
    assert rows(query, MEANS) == [(0, 2 / 3), (1, 2 / 3), (2, 2 / 3)]


def test_tokens_carry_the_advantage_with_which_they_were_trained_on(query: Query) -> None:
    found = rows(query, "SELECT group_id, sample_index, list(position ORDER BY position), list(DISTINCT advantage), "
                 "list(DISTINCT log_prob), sum(loss_mask) FROM tokens WHERE run = 'toy' AND iteration = 0 "
                 "AND sample_index = 1 GROUP BY 1, 2 ORDER BY 1")  # fmt: skip
    assert found == [
        (0, 1, [0, 1], [-1], [-0.5], 2),
        (1, 1, [0, 1, 2], [-1], [-0.5], 3),
        (2, 1, [0, 1, 2, 3], [None], [-0.5], 4),
    ]


def test_a_group_that_waited_in_the_buffer_says_which_iteration_trained_on_it(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path))
    write_iteration(ledger, 0)
    write_iteration(ledger, 1, buffered=(2,))
    found = rows(open_query(ledger.store), "SELECT DISTINCT group_id, iteration, disposition, trained_in FROM samples "
                 "WHERE group_id IN (1, 2) ORDER BY 1")  # fmt: skip
    assert found == [(1, 0, "train", 0), (2, 0, "train", 1)]
    judged = rows(open_query(ledger.store), "SELECT iteration, generated_in, disposition, samples FROM groups "
                  "WHERE group_id = 2 ORDER BY 1")  # fmt: skip
    assert judged == [(0, 0, "drop", 2), (1, 0, "train", 2)]


def test_steps_and_costs_have_a_row_for_each_commit(query: Query) -> None:
    found = rows(query, "SELECT step, count(*), max(metrics['loss']), max(weight_version_out) FROM steps "
                 "WHERE run = 'toy' AND step IN ('rollout', 'train') GROUP BY 1 ORDER BY 1")  # fmt: skip
    assert found == [("rollout", 6, None, None), ("train", 3, 0.1, 3)]
    tokens = "SELECT sum(prompt_tokens), sum(response_tokens), sum(trained_tokens) FROM costs WHERE run = 'toy'"
    assert rows(query, tokens) == [(3 * 18, 3 * 18, 3 * 28)]
    evaluated = "SELECT weight_version, benchmark, reward FROM evals WHERE run = 'toy' ORDER BY 1"
    assert rows(query, evaluated) == [(0, "heldout", 1), (2, "heldout", 1), (3, "heldout", 1)]


def test_a_fork_has_what_it_shares_and_owner_counts_it_once(query: Query) -> None:
    counted = "SELECT run, owner, min(iteration), max(iteration), count(*) FROM {} GROUP BY 1, 2 ORDER BY 1, 2"
    assert rows(query, counted.format("rewards")) == [
        ("branch", "branch", 2, 2, 6),
        ("branch", "toy", 0, 1, 12),
        ("toy", "toy", 0, 2, 18),
    ]
    assert rows(query, "SELECT count(*) FROM samples WHERE run = owner") == [(24,)]
    assert rows(query, "SELECT run, parent, parent_iteration, last_iteration FROM runs ORDER BY 1") == [
        ("branch", "toy", 1, 2),
        ("toy", None, None, 2),
    ]
    commits = {(c.name, c.digest) for i in range(3) for c in Ledger.open(query.store, "branch").commits(i)}
    assert set(rows(query, "SELECT name, digest FROM steps WHERE run = 'branch'")) == commits


def test_one_run_is_asked_alone_with_what_it_shares(query: Query) -> None:
    alone = open_query(query.store, "branch")
    assert rows(alone, "SELECT DISTINCT run FROM samples") == [("branch",)]
    assert rows(alone, "SELECT count(*) FROM samples") == [(18,)]
    with pytest.raises(FileNotFoundError, match="no run 'brunch'"):
        open_query(query.store, "brunch")


@pytest.mark.parametrize("view", VIEWS)
def test_every_column_of_a_view_has_the_type_that_it_says(query: Query, view: str) -> None:
    everything = rows(query, f"DESCRIBE SELECT * FROM {view}")
    assert [(name, kind) for name, kind, *_ in everything] == [
        (name, column.type.replace("TIMESTAMPTZ", "TIMESTAMP WITH TIME ZONE"))
        for name, column in VIEWS[view].columns.items()
    ]


def test_what_is_committed_between_two_queries_is_seen_by_the_second(copied: Store) -> None:
    query = open_query(copied)
    before = rows(query, "SELECT max(iteration), count(*) FROM rewards WHERE run = 'branch'")
    ledger = Ledger.open(copied, "branch")
    ledger.acquire(takeover=True)
    write_iteration(ledger, 3)
    assert before == [(2, 18)]
    assert rows(query, "SELECT max(iteration), count(*) FROM rewards WHERE run = 'branch'") == [(3, 24)]


def _indices(cache: Path) -> Iterator[Path]:
    yield from cache.rglob("*.arrow")


@pytest.mark.parametrize("fault", ["absent", "torn", "altered", "unwritable"])
def test_an_index_that_cannot_be_used_changes_no_answer(query: Query, cache: Path, fault: str) -> None:
    everything = "SELECT * FROM steps ORDER BY run, name"
    before = query.sql(everything)
    assert len([*_indices(cache)]) == 2
    for index in [*_indices(cache)]:
        data = bytearray(index.read_bytes())
        if fault == "absent":
            index.unlink()
        elif fault == "torn":
            index.write_bytes(data[: len(data) // 2])
        elif fault == "altered":
            data[len(data) // 2] ^= 1
            index.write_bytes(data)
        else:
            index.unlink()
            index.mkdir()
    assert query.sql(everything).equals(before)
    assert query.sql(everything).equals(before)
    assert query.notes == ()


def test_an_index_of_another_history_under_the_same_address_is_not_believed(copied: Store, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    shutil.copytree(copied.url, backup)
    for history in range(2):
        shutil.rmtree(copied.url)
        shutil.copytree(backup, copied.url)
        ledger = Ledger.open(copied, "branch")
        ledger.acquire(takeover=True)
        write_iteration(ledger, 3, until=Step.TRAIN if history else None)
        digests = {(commit.name, commit.digest) for commit in ledger.commits(3)}
        found = set(rows(open_query(copied), "SELECT name, digest FROM steps WHERE run = 'branch' AND iteration = 3"))
        assert found == digests


def test_the_second_query_reads_no_commit_but_the_newest(copied: Store) -> None:
    query = open_query(copied, "toy")
    rows(query, MEANS)
    read: list[str] = []
    original = copied.read_many
    copied.read_many = lambda paths: read.extend(paths) or original(paths)  # type: ignore[method-assign, func-returns-value]
    rows(query, MEANS)
    assert {path.split("/")[3] for path in read if "/iterations/" in path} == {"000002"}


def _files(store: Store, run: str, iteration: int, step: Step) -> list[Path]:
    return sorted((Path(store.url) / layout.attempts(run, iteration, step)).rglob("*.parquet"))


def test_of_the_files_those_are_read_that_a_query_needs(copied: Store) -> None:
    for step in (Step.ROLLOUT, Step.ADVANTAGE):
        for iteration in range(3):
            for file in _files(copied, "toy", iteration, step):
                file.write_bytes(b"no table")
    for file in _files(copied, "toy", 0, Step.REWARD):
        file.write_bytes(b"no table")
    query = open_query(copied)
    for view in ("rewards", "samples"):
        assert rows(query, f"SELECT avg(reward) FROM {view} WHERE iteration = 1 AND run = 'toy'") == [(2 / 3,)]
        assert query.notes == ()


@pytest.mark.parametrize("fault", ["lost", "torn", "empty"])
def test_a_file_that_cannot_be_read_is_left_out_and_named(copied: Store, fault: str) -> None:
    (file, _) = _files(copied, "toy", 1, Step.REWARD)
    if fault == "lost":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-9] if fault == "torn" else b"")
    query = open_query(copied, "toy")
    counted = "SELECT iteration, count(*), count(reward) FROM samples GROUP BY 1 ORDER BY 1"
    assert rows(query, counted) == [(0, 6, 6), (1, 6, 2), (2, 6, 6)]
    (note,) = query.notes
    assert str(file.relative_to(copied.url)) in note


def test_what_retention_removed_is_left_out_without_a_word(copied: Store) -> None:
    copied.write(layout.retired("toy", 0, layout.Kind.SNAPSHOTS), b"{}")
    for step in (Step.ROLLOUT, Step.REWARD, Step.FILTER, Step.ADVANTAGE):
        for file in _files(copied, "toy", 0, step):
            file.unlink()
    query = open_query(copied, "toy")
    assert rows(query, MEANS) == [(1, 2 / 3), (2, 2 / 3)]
    assert rows(query, "SELECT count(*) FROM steps WHERE iteration = 0") == [
        (len(Ledger.open(copied, "toy").commits(0)),)
    ]
    assert query.notes == ()


def test_a_commit_that_cannot_be_read_is_left_out_and_named(copied: Store) -> None:
    copied.write(layout.commit("toy", 1, Step.REWARD, "00-000"), b'{"schema_version": 3, "run": "toy"}')
    query = open_query(copied, "toy")
    assert rows(query, "SELECT iteration, count(*) FROM rewards GROUP BY 1 ORDER BY 1") == [(0, 6), (1, 2), (2, 6)]
    assert "iterations/000001/reward.00-000.json" in query.notes[0]


def test_a_commit_that_names_a_file_elsewhere_leads_nowhere(copied: Store) -> None:
    path = layout.commit("toy", 1, Step.REWARD, "00-000")
    file = _files(copied, "branch", 2, Step.REWARD)[0].relative_to(Path(copied.url) / "runs" / "branch")
    forged = copied.read(path).decode().replace("iterations/000001/reward/", f"../branch/{file.parent}/")
    copied.write(path, forged.encode())
    assert rows(open_query(copied, "toy"), "SELECT count(*) FROM rewards WHERE iteration = 1") == [(2,)]


@pytest.mark.parametrize(
    "text",
    [
        "COPY samples TO '{folder}/out.csv'",
        "CREATE TABLE t AS SELECT * FROM samples",
        "ATTACH '{folder}/other.db'",
        "SET enable_external_access = true",
        "INSTALL httpfs",
        "SELECT 1; SELECT 2",
        "PRAGMA database_list",
        "SELECT * FROM read_text('{folder}/secret')",
        "SELECT * FROM '{folder}/secret.csv'",
        "SELECT * FROM glob('{folder}/*')",
        "SELECT * FROM read_text('{store}/../secret')",
        "SELECT * FROM query('COPY (SELECT 1) TO ''{folder}/out.csv''')",
        "WITH x AS (SELECT * FROM read_csv('{folder}/secret.csv')) SELECT * FROM x",
    ],
)
def test_a_query_changes_nothing_and_reads_no_other_file(written: Path, tmp_path: Path, text: str) -> None:
    for name in ("secret", "secret.csv"):
        (tmp_path / name).write_text("secret\n")
    with pytest.raises(BadQuery):
        open_query(open_store(str(written))).sql(text.format(folder=tmp_path, store=written / "runs"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "secret.csv"]


def test_names_in_a_query_are_no_variables_of_the_caller(query: Query) -> None:
    import pyarrow as pa

    private = pa.table({"x": [1]})
    with pytest.raises(BadQuery, match="no view 'private'"):
        query.sql("SELECT * FROM private")
    assert private.num_rows == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SELECT rewrd FROM samples", "no column 'rewrd' in samples; did you mean 'reward'"),
        ("SELECT * FROM sample", "no view 'sample'; did you mean 'samples'"),
        ("SELEC 1", "syntax error"),
        ("SELECT sum(prompt) FROM samples", "sum"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(query: Query, text: str, message: str) -> None:
    with pytest.raises(BadQuery, match=message) as error:
        query.sql(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT s FROM samples s",
        "SELECT count(*) FROM rewards NATURAL JOIN advantages",
        "SUMMARIZE SELECT * FROM groups",
        "SELECT COLUMNS('.*reward') FROM samples",
        "FROM runs",
        "WITH samples AS (SELECT 1 AS x) SELECT x FROM samples",
        "SELECT (SELECT count(*) FROM tokens t WHERE t.group_id = s.group_id) FROM samples s",
        "SELECT * FROM (PIVOT rewards ON sample_index IN (0, 1) USING avg(reward) GROUP BY group_id)",
    ],
)
def test_any_form_of_select_finds_its_columns(query: Query, text: str) -> None:
    assert query.sql(text).num_rows > 0


def test_an_empty_store_has_every_view(tmp_path: Path) -> None:
    query = open_query(open_store(str(tmp_path)))
    for view in VIEWS:
        assert query.sql(f"SELECT * FROM {view}").num_rows == 0


@pytest.mark.slow
def test_a_store_on_s3_answers_as_one_on_files(
    written: Path, s3_server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_server(monkeypatch, s3_server)
    local, remote = open_store(str(written)), open_store(s3_url)
    for path in local.find("runs"):
        remote.write(path, local.read(path))
    for view in ("runs", "steps", "samples", "tokens"):
        text = f"SELECT * FROM {view} ORDER BY ALL"
        assert open_query(remote).sql(text).equals(open_query(local).sql(text)), view
    with pytest.raises(BadQuery):
        open_query(remote).sql("SELECT * FROM read_text('/etc/hostname')")
