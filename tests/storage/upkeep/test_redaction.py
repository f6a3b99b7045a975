"""Redaction: a prompt's text and tokens leave the run, wherever it is broken off, and all else stays what it was."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from typer.testing import CliRunner

from cairn.flows.cli import app
from cairn.flows.reading.samples import iteration_samples
from cairn.storage.ledger import layout
from cairn.storage.ledger import snapshots as tables
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.decisions import Decision, Redaction
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import Parent
from cairn.storage.ledger.redacted import REDACTED_ERROR, Fault, redact_rows
from cairn.storage.ledger.schemas import CALLS, SCORE, rollout_schema
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.logs.answers import Answer, Answers, prompt_digest
from cairn.storage.logs.parts import part_bytes
from cairn.storage.opening import open_store
from cairn.storage.query.database import open_query
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged, Redacted
from cairn.storage.store.local import LocalStore
from cairn.storage.store.store import Store
from cairn.storage.upkeep.redaction import redact
from cairn.storage.upkeep.retention import pin, require_restorable
from cairn.storage.upkeep.verification import verify
from tests.flows.written_runs import config_of, eval_table, new_run, rollout_table, write_iteration

PROMPT = 3
"""Group 0 of iteration 1, which trained on it."""
TEXT = f"[{PROMPT}] 2 + 2 ="


class _Crash(Exception):
    pass


class _CrashingStore(LocalStore):
    """Dies at a change."""

    left = 10**6

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _Crash

    def write(self, path: str, data: bytes) -> None:
        self._count()
        super().write(path, data)

    def create(self, path: str, data: bytes, guard: Callable[[], None] = lambda: None) -> bool:
        self._count()
        return super().create(path, data, guard)

    def delete(self, path: str) -> None:
        self._count()
        super().delete(path)


def written(folder: Path | Store, iterations: int = 4) -> Ledger:
    """Checkpoints follow iterations 1 and 3. An evaluation asks for the very text of the prompt, and an interrupted
    attempt has left a part with it."""
    store = _CrashingStore(str(folder)) if isinstance(folder, Path) else folder
    ledger = new_run(store, rollout={"num_rollout": 6})
    for index in range(iterations):
        write_iteration(ledger, index)
    heldout = eval_table("other", 0)
    text = heldout.set_column(heldout.column_names.index("prompt_text"), heldout.schema.field("prompt_text"), [[TEXT]])
    attempt = ledger.attempt(2, Step.EVAL, "other-v000000")
    trained = ledger.find(1, Step.TRAIN)
    assert trained is not None
    ledger.commit(
        iteration=2, step=Step.EVAL, shard="other-v000000", attempt=attempt, inputs={trained.name: trained.digest},
        config_digest="0" * 64, environment=trained.environment, started_at=0.0,
        outputs=(attempt.write_table("rows.parquet", text),), values={"benchmark": "other"},
    )  # fmt: skip
    lost = ledger.attempt(1, Step.ROLLOUT, "00-000")
    lost.write_table("lost.parquet", rollout_table(1, (0, 1), 1))
    return ledger


def reopened(ledger: Ledger) -> Ledger:
    return Ledger.open(LocalStore(ledger.store.url), ledger.run)


def holding_text(ledger: Ledger) -> list[str]:
    """Store paths of tables in which the prompt's text, or a token of its samples, is found."""
    found = []
    for path in ledger.store.find(layout.iterations(ledger.run)):
        if not path.endswith(".parquet"):
            continue
        table = tables.from_parquet(ledger.store.read(path))
        if "prompt_text" in table.column_names and TEXT in table["prompt_text"].to_pylist():
            found.append(path)
        elif "group_id" in table.column_names:
            rows = table.filter(pc.equal(table["group_id"], PROMPT))
            lists = [name for name in rows.column_names if pa.types.is_list(rows.schema.field(name).type)]
            if any(value for name in lists for value in rows[name].to_pylist()):
                found.append(path)
    return found


def findings(ledger: Ledger) -> set[Fault]:
    return {finding.fault for one in verify(reopened(ledger)) for finding in one.findings}


def test_the_text_is_gone_from_every_table_and_all_else_is_what_it_was(tmp_path: Path) -> None:
    ledger = written(tmp_path)
    before = {path: ledger.store.read(path) for path in ledger.store.find(layout.iterations("toy"))}
    assert len(holding_text(ledger)) == 4, "rollout, advantage, the evaluation, and what the lost attempt left"
    decision = redact(ledger, PROMPT, by="ada", why="asked")
    assert holding_text(ledger) == []
    assert findings(ledger) == set()
    what = decision.what
    assert isinstance(what, Redaction)
    assert (what.samples, what.trained_in, what.weight_versions, decision.why) == (2, (1,), (2,), "asked")
    assert [file.step for file in what.files] == ["eval", "advantage", "reward", "rollout"]

    redacted = {layout.in_run("toy", file.path) for file in what.files}
    after = {path: ledger.store.read(path) for path in ledger.store.find(layout.iterations("toy"))}
    assert {path for path in before if before[path] != after.get(path)} - redacted == before.keys() - after.keys()
    for path in redacted:
        old, new = (tables.from_parquet(bytes_[path]) for bytes_ in (before, after))
        assert old.schema == new.schema
        names = [name for name in ("group_id", "prompt_index", "reward", "status", "seed") if name in old.column_names]
        assert old.select(names).equals(new.select(names)), "who they were and what they got stays"
        if "group_id" in old.column_names:
            others = pc.not_equal(old["group_id"], PROMPT)
            assert old.filter(others).equals(new.filter(others))
    assert sum(one.redacted for one in verify(ledger)) == len(redacted)


def some(kind: pa.DataType) -> object:
    """A value of a type."""
    if pa.types.is_struct(kind):
        return {field.name: some(field.type) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [some(kind.value_type)]
    return "x" if pa.types.is_string(kind) else b"x" if pa.types.is_large_binary(kind) else 1


@pytest.mark.parametrize(
    ("schema", "has"),
    [
        (
            rollout_schema(cut=True, several=True, routed=True, images=True),
            {"response_ids", "kept_token_ids", "routed_experts", "images"},
        ),
        (SCORE, {"log_probs", "teacher_top_ids", "teacher_top_log_probs"}),
    ],
    ids=["rollout", "score"],
)
def test_no_column_keeps_what_it_has_for_each_token(schema: pa.Schema, has: set[str]) -> None:
    table = pa.table({field.name: pa.array([some(field.type)] * 2, field.type) for field in schema}, schema)
    gone, unchanged = redact_rows(table, pa.array([True, False])).to_pylist()
    nested = [field.name for field in schema if pa.types.is_nested(field.type)]
    assert has <= set(nested)
    assert not any(gone[name] for name in nested)
    assert unchanged == table.to_pylist()[1]


def test_whoever_reads_finds_the_rows_without_their_text(s3_url: str) -> None:
    ledger = written(open_store(s3_url))
    redact(ledger, PROMPT)
    view = next(view for view in iteration_samples(ledger, 1) if view.group_id == PROMPT)
    assert (view.prompt, view.response, view.reward, view.error) == ("", "", 1.0, REDACTED_ERROR)
    table = open_query(open_store(s3_url)).sql(
        f"SELECT prompt, response, sample_index FROM samples WHERE prompt_index = {PROMPT} ORDER BY sample_index"
    )
    assert [tuple(row.values()) for row in table.to_pylist()] == [("", "", 0), ("", "", 1)]


@pytest.mark.proof
def test_tables_that_an_interrupted_redaction_has_not_replaced_are_queried_as_they_are(s3_url: str) -> None:
    ledger = written(open_store(s3_url))

    def crash(sentence: str) -> None:
        if sentence.startswith("2 of 4 tables redacted"):
            raise _Crash

    count = "SELECT (SELECT count(*) FROM samples), (SELECT count(*) FROM rewards), (SELECT count(*) FROM advantages)"
    before = open_query(open_store(s3_url)).sql(count).to_pylist()
    with pytest.raises(_Crash):
        redact(ledger, PROMPT, progress=crash)
    assert open_query(open_store(s3_url)).sql(count).to_pylist() == before


@pytest.mark.proof
def test_a_redaction_that_crashed_anywhere_harms_nobody_and_is_finished_by_giving_it_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    whole = written(tmp_path_factory.mktemp("whole"))
    redact(whole, PROMPT)
    original = tmp_path_factory.mktemp("original")
    written(original)
    moments = 0
    while True:
        store = _CrashingStore(str(shutil.copytree(original, tmp_path_factory.mktemp("store"), dirs_exist_ok=True)))
        ledger = Ledger.open(store, "toy")
        store.left = moments
        try:
            redact(ledger, PROMPT)
            break
        except _Crash:
            store.left = 10**6
        moments += 1
        interrupted = reopened(ledger)
        assert findings(ledger) <= {Fault.UNREDACTED}
        for commit in (one for index in interrupted.iterations() for one in interrupted.commits(index)):
            for output in commit.outputs:
                assert read_table(interrupted.store, commit.run, output).num_rows == output.rows
        redact(interrupted, PROMPT)
        assert holding_text(interrupted) == []
        assert findings(interrupted) == set()
        assert sum(isinstance(one.what, Redaction) for one in interrupted.decisions.all()) == 1
        contents = [
            [tables.from_parquet(one.store.read(layout.in_run("toy", output.path))) for output in commit.outputs]
            for one in (whole, interrupted)
            for commit in one.commits(1)
        ]
        assert contents[: len(contents) // 2] == contents[len(contents) // 2 :]
    assert moments == 1 + 4 + 1, "the decision, four tables, what the lost attempt left"


@pytest.mark.proof
def test_of_two_at_once_the_second_is_refused_before_it_replaces_what_the_first_has_replaced(tmp_path: Path) -> None:
    ledger = written(tmp_path)
    second = reopened(ledger)

    def first(sentence: str) -> None:
        if sentence.startswith("looking at 000003/") and not second.decisions.all():
            redact(second, PROMPT + 1, by="ada")  # of the same shard

    with pytest.raises(ValueError, match="is being redacted by decision 1 of ada: run the command again"):
        redact(ledger, PROMPT, progress=first)
    assert findings(ledger) == set()
    redact(ledger, PROMPT)
    assert holding_text(ledger) == []
    assert findings(ledger) == set()


def test_beyond_what_was_redacted_an_altered_table_is_damage(tmp_path: Path) -> None:
    ledger = written(tmp_path)
    decision = redact(ledger, PROMPT)
    assert isinstance(decision.what, Redaction)
    file = decision.what.files[-1]
    path = layout.in_run("toy", file.path)
    table = tables.from_parquet(ledger.store.read(path))
    ledger.store.write(path, tables.to_parquet(table.slice(1)))
    assert findings(ledger) == {Fault.ALTERED}
    commit = ledger.find(1, Step.ROLLOUT, "00-000")
    assert commit is not None
    with pytest.raises(Damaged, match="is not what was committed"):
        read_table(ledger.store, "toy", commit.outputs[0])


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [(9, "needs its samples of iteration 3 to recover"), (99, "holds no text of prompt 99")],
)
def test_samples_that_are_needed_or_not_there_are_refused(tmp_path: Path, prompt: int, sentence: str) -> None:
    ledger = written(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        redact(ledger, prompt)
    assert ledger.decisions.all() == ()


def test_until_a_checkpoint_follows_the_samples_stay(tmp_path: Path) -> None:
    ledger = written(tmp_path, iterations=3)  # the newest checkpoint is iteration 1's
    with pytest.raises(ValueError, match="needs its samples of iteration 2 to recover"):
        redact(ledger, 6)
    write_iteration(ledger, 3)
    write_iteration(ledger, 4, until=Step.ADVANTAGE)
    redact(ledger, 6)


def test_what_is_being_generated_is_refused(tmp_path: Path) -> None:
    ledger = written(tmp_path)
    attempt = ledger.attempt(4, Step.ROLLOUT, "00-000")
    sink = pa.BufferOutputStream()
    rows = rollout_table(1, (0,), 1)
    with pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)
    data = sink.getvalue().to_pybytes()
    ledger.store.write(attempt.path(f"write_ahead/000000.{hashlib.sha256(data).hexdigest()}.arrow"), data)
    with pytest.raises(ValueError, match="samples of it are being generated in iteration 4"):
        redact(ledger, PROMPT)


def forked(ledger: Ledger, name: str, iteration: int) -> Ledger:
    parent = Parent(run=ledger.run, iteration=iteration)
    return Ledger.create(ledger.store, name, config_of(ledger), {"data": "0" * 64}, parent=parent)


def test_samples_from_which_a_fork_or_a_pinned_iteration_is_brought_back_stay(tmp_path: Path) -> None:
    ledger = written(tmp_path)
    pin(ledger, 2)
    with pytest.raises(ValueError, match=r"iteration 2 is pinned, and its weights are recomputed from .* cairn unpin"):
        redact(ledger, 6)
    forked(ledger, "early", 0)
    with pytest.raises(ValueError, match="run 'early' needs its samples of iteration 0"):
        redact(ledger, 0)


def test_a_fork_reads_what_it_shares_as_it_was_redacted_and_none_is_made_that_would_need_it(tmp_path: Path) -> None:
    ledger = written(tmp_path)
    late = forked(ledger, "late", 3)
    redact(ledger, 6)
    assert findings(late) == set()
    with pytest.raises(ValueError, match="holds no text of prompt 6 in its own samples; toy holds the shared ones"):
        redact(late, 6)
    require_restorable(ledger, 3)
    with pytest.raises(Redacted, match="cannot be forked at iteration 2: that needs 000002/"):
        require_restorable(ledger, 2)


def test_the_command_says_which_weights_saw_the_samples(tmp_path: Path) -> None:
    ledger = written(tmp_path)
    give = ("delete", "toy", "--prompt", str(PROMPT), "--why", "asked", "--store", str(tmp_path))
    assert CliRunner().invoke(app, give, input="no\n").exit_code == 2
    assert ledger.decisions.all() == ()
    result = CliRunner().invoke(app, give, input="toy\n")
    assert result.exit_code == 0, result.output
    assert "prompt 3 is redacted in run toy: 2 samples, 4 tables (decision 1)" in result.output
    assert "updates of iteration 1 trained on them: weights from version 2 on contain their effect" in result.output
    assert "cairn quarantine toy --prompt 3" in result.output
    newest: Decision = reopened(ledger).decisions.all()[-1]
    assert newest.why == "asked"
    verified = CliRunner().invoke(app, ("verify", "toy", "--store", str(tmp_path)))
    assert verified.exit_code == 0, verified.output
    assert "(4 of them redacted)" in verified.output


def test_what_graders_said_about_the_prompt_goes_and_all_else_stays(tmp_path: Path) -> None:
    ledger = written(tmp_path)
    store = ledger.store
    about = {"a" * 64: prompt_digest(TEXT), "b" * 64: prompt_digest("[0] another"), "c" * 64: None}
    judge, other = Answers(store, "judge", "1"), Answers(store, "judge", "2")
    said = {question: Answer(1.0, {"judge": f"{TEXT} is easy"}, None, prompt) for question, prompt in about.items()}
    judge.write(said)
    judge.write({"a" * 64: said["a" * 64]})
    other.write({"b" * 64: said["b" * 64]})
    store.write("answers/notes.txt", b"somebody's")
    redact(ledger, PROMPT)
    unchanged = {"b" * 64: said["b" * 64]}
    for version in ("1", "2"):
        assert Answers(store, "judge", version).find(list(about)) == unchanged
    left = [ipc_rows(store, path) for path in store.find("answers") if path.endswith(".arrow")]
    assert [row["question"] for rows in left for row in rows] == ["b" * 64, "b" * 64]
    assert store.read("answers/notes.txt") == b"somebody's"


def ipc_rows(store: Store, path: str) -> list[dict[str, object]]:
    return tables.from_ipc(store.read(path)).to_pylist()


def test_answers_of_earlier_versions_are_read_and_go_as_nobody_knows_what_they_are_about(tmp_path: Path) -> None:
    ledger = written(tmp_path)
    columns = {"question": ["a" * 64], "reward": [0.5], "components": ['{"judge": "x"}'], "error": [None]}
    types = [("question", pa.string()), ("reward", pa.float64()), ("components", pa.string()), ("error", pa.string())]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema(types)) as writer:
        writer.write_table(pa.table(columns, pa.schema(types)))
    data = sink.getvalue().to_pybytes()
    folder = layout.answers(canonical.digest({"grader": "judge", "version": "1"}))
    ledger.store.write(f"{folder}/{hashlib.sha256(data).hexdigest()}.arrow", data)
    assert Answers(ledger.store, "judge", "1").find(["a" * 64]) == {"a" * 64: Answer(0.5, {"judge": "x"})}
    redact(ledger, PROMPT)
    assert ledger.store.list(folder) == []


def test_what_is_not_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = written(tmp_path)
    monkeypatch.setattr("cairn.storage.evals.folders", lambda store: iter(["evals/one", "evals/two"]))
    monkeypatch.setattr("cairn.storage.evals.Evaluation.from_bytes", lambda data, path: data.decode())
    monkeypatch.setattr(
        "cairn.storage.evals.read_samples", lambda store, result: {"prompt_text": pa.chunked_array([[result]])}
    )
    for name, text in (("one", TEXT), ("two", "another")):
        ledger.store.write(f"evals/{name}/result.json", text.encode())
    for folder, group in (("iterations/000003/rollout/00-000.000009-ab", 77), ("stream/000009-ab", 78)):
        calls = CALLS.empty_table().to_pydict() | {"group_id": [group]}
        row = {name: values or [None] for name, values in calls.items()}
        table = pa.table({field.name: pa.array(row[field.name], field.type) for field in CALLS})
        sha256, data = part_bytes(table, "inputs")
        ledger.store.write(f"runs/{ledger.run}/{folder}/write_ahead/calls/0000-000001.{sha256}.arrow", data)
    sentences: list[str] = []
    redact(ledger, PROMPT, on_remaining=sentences.append)
    places = ("evals/one", "000003/rollout/00-000.000009-ab", "stream/000009-ab")
    for place, sentence in zip(places, sentences, strict=True):
        assert place in sentence
