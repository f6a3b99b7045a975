"""Results of evaluations in a store: computed once, whoever asks, and lost by nobody."""

import hashlib
import json
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from cairn.storage.evals import Claim, Evaluation, EvaluationKey, find, find_or_claim, read_samples, results
from cairn.storage.ledger import layout
from cairn.storage.ledger.schemas import EVALUATED, GENERATED_EVAL
from cairn.storage.logs.sample_log import SampleLog
from cairn.storage.opening import open_store
from cairn.storage.query.database import open_query
from cairn.storage.records import Environment
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store
from cairn.storage.upkeep.evals import collect, garbage, verify
from tests.tables import cases

WEIGHTS, TOKENIZER = (hashlib.sha256(name).hexdigest() for name in (b"weights", b"tokenizer"))
KEY = EvaluationKey(weights=WEIGHTS, tokenizer=TOKENIZER, benchmark="gsm8k", settings={"dtype": "float32"})
ROWS = pa.table({"reward": [1.0, 0.0]})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def commit(store: Store, claim: Claim, score: float = 0.5) -> Evaluation:
    attempt = claim.attempt()
    return claim.commit(
        attempt,
        outputs=(attempt.write_table("samples.parquet", ROWS),),
        metrics={"score": score},
        values={},
        origin={"model": "folder"},
        timings={},
        started_at=0.0,
        environment=Environment(device="cpu", threads=1),
    )


def claimed(store: Store, key: EvaluationKey = KEY) -> Claim:
    found = find_or_claim(store, key)
    assert isinstance(found, Claim)
    return found


def test_a_result_that_is_there_is_found_and_nothing_is_claimed(store: Store) -> None:
    with claimed(store) as claim:
        made = commit(store, claim)
    assert find_or_claim(store, KEY) == made
    assert store.list(layout.evaluation_claims(KEY.folder)) == ["000001.end.json", "000001.json"]
    assert read_samples(store, made).equals(ROWS)


def test_who_asks_while_another_computes_gets_that_result(store: Store) -> None:
    reported: list[object] = []
    answers: list[Evaluation | Claim] = []
    with claimed(store) as claim:
        asking = threading.Thread(target=lambda: answers.append(find_or_claim(store, KEY, reported.append)))
        asking.start()
        while not reported:
            asking.join(0.01)
        made = commit(store, claim)
    asking.join()
    assert answers == [made]


def test_a_claim_that_failed_is_taken_over(store: Store) -> None:
    with pytest.raises(RuntimeError), claimed(store):
        raise RuntimeError
    with claimed(store) as claim:
        assert commit(store, claim).epoch == 2


def test_samples_that_a_failed_claim_finished_are_there_for_the_next(store: Store) -> None:
    row = {"group_id": 3, "sample_index": 0, "response_ids": [1], "log_probs": [-0.5], "finish_reason": "stop"}
    finished = pa.Table.from_pylist([{**row, "error": None, "seconds": 0.1}], GENERATED_EVAL)
    claim = claimed(store)
    with SampleLog(claim.attempt(), KEY.digest, schema=GENERATED_EVAL) as log:
        log.append(finished)
    claim.__exit__(RuntimeError)
    with claimed(store) as claim, SampleLog(claim.attempt(), KEY.digest, schema=GENERATED_EVAL) as log:
        assert log.recover().equals(finished)


def test_samples_that_an_earlier_version_finished_are_there_too(store: Store) -> None:
    """Its log had fewer columns, and fewer that may be null."""
    names = ("group_id", "sample_index", "response_ids", "log_probs", "finish_reason", "error", "seconds")
    fields = [GENERATED_EVAL.field(name).with_nullable(name == "error") for name in names]
    row = {"group_id": 3, "sample_index": 0, "response_ids": [1], "log_probs": [-0.5], "finish_reason": "stop"}
    finished = pa.Table.from_pylist([{**row, "error": None, "seconds": 0.1}], pa.schema(fields))
    claim = claimed(store)
    with SampleLog(claim.attempt(), KEY.digest, schema=finished.schema) as log:
        log.append(finished)
    claim.__exit__(RuntimeError)
    with claimed(store) as claim, SampleLog(claim.attempt(), KEY.digest, schema=GENERATED_EVAL) as log:
        found = log.recover()
    assert found.schema.equals(GENERATED_EVAL)
    assert found.select(names).to_pylist() == finished.to_pylist()


@cases(
    ("field", "value", "said"),
    [
        ("origin", {"run": "toy", "iteration": "x"}, "its weights come from iteration 'x'"),
        ("origin", {"run": "toy", "iteration": True}, "its weights come from iteration True"),
        ("origin", {"run": "toy", "iteration": -1}, "its weights come from iteration -1"),
        ("metrics", {"score": "NaN"}, "its score is nan"),
        ("metrics", {"samples": 2.0}, "its score is nan"),
        ("outputs", [], "it has 0 tables"),
    ],
)
def test_a_result_of_another_writer_that_cannot_be_one_is_named_with_the_way_out(
    store: Store, field: str, value: object, said: str
) -> None:
    with claimed(store) as claim:
        made = commit(store, claim)
    path = layout.evaluation_result(KEY.folder)
    store.delete(path)
    store.create(path, canonical.seal(made.as_fields() | {field: value}))
    with pytest.raises(Damaged, match=f"{path} cannot be trusted: {said}; delete its folder, and it is evaluated anew"):
        list(results(store))
    store.delete(path)


@pytest.mark.parametrize(
    "other",
    [
        {"weights": TOKENIZER},
        {"tokenizer": WEIGHTS},
        {"benchmark": "math500"},
        {"settings": {"dtype": "bfloat16"}},
        {"settings": {"dtype": "float32", "seed": 1}},
    ],
)
def test_whatever_a_result_depends_on_has_a_place_of_its_own(store: Store, other: dict[str, object]) -> None:
    with claimed(store) as claim:
        commit(store, claim)
    assert find(store, KEY.model_copy(update=other)) is None


def test_a_result_whose_bytes_were_altered_is_not_believed(store: Store) -> None:
    with claimed(store) as claim:
        made = commit(store, claim, score=0.5)
    path = layout.evaluation_result(KEY.folder)
    store.write(path, canonical.to_bytes({**json.loads(store.read(path)), "metrics": {"score": 1.0}}))
    with pytest.raises(Damaged, match=r"result\.json cannot be trusted"):
        find(store, KEY)
    store.write(f"{KEY.folder}/{made.outputs[0].path}", b"other rows")
    with pytest.raises(Damaged, match=r"samples\.parquet is not what was committed"):
        read_samples(store, made)


def test_results_of_all_models_are_listed_and_what_else_lies_there_is_passed_over(store: Store) -> None:
    keys = [KEY, KEY.model_copy(update={"weights": TOKENIZER}), KEY.model_copy(update={"benchmark": "math500"})]
    for key in keys:
        with claimed(store, key) as claim:
            commit(store, claim)
    claimed(store, KEY.model_copy(update={"benchmark": "unfinished"}))
    store.write(f"{layout.EVALS}/.DS_Store", b"")
    assert {result.key.digest for result in results(store)} == {key.digest for key in keys}


def test_verification_names_what_is_missing_altered_or_unreadable(store: Store) -> None:
    made = []
    for benchmark in ("a", "b", "c", "d"):
        with claimed(store, KEY.model_copy(update={"benchmark": benchmark})) as claim:
            made.append(commit(store, claim))
    store.delete(f"{made[0].key.folder}/{made[0].outputs[0].path}")
    store.write(f"{made[1].key.folder}/{made[1].outputs[0].path}", b"other")
    store.write(layout.evaluation_result(made[2].key.folder), b"{}")
    found = {check.name.partition("/")[2][0]: [finding.fault for finding in check.findings] for check in verify(store)}
    assert found == {"a": ["missing"], "b": ["altered"], "c": ["unreadable"], "d": []}


def test_what_interrupted_evaluations_left_goes_and_finished_samples_stay(store: Store) -> None:
    unfinished = claimed(store)
    parts = f"{unfinished.attempt().folder}/write_ahead/000000.{'0' * 64}.arrow"
    torn = f"{unfinished.attempt().folder}/samples.parquet"
    for path in (parts, torn):
        store.write(path, b"bytes")
    assert list(garbage(store)) == []  # its claimant lives
    unfinished.__exit__(RuntimeError)
    assert [one.path for one in garbage(store)] == [torn]
    with claimed(store) as claim:
        made = commit(store, claim)
    found = list(garbage(store))
    assert {one.path: one.reason for one in found} == {parts: "lost", torn: "lost"}
    collect(store, found)
    assert list(garbage(store)) == []
    assert read_samples(store, made).equals(ROWS)
    assert {check.findings for check in verify(store)} == {()}
    attempts = [name for name in store.list(KEY.folder) if name.endswith("/") and name != "claims/"]
    assert attempts == [f"{made.attempt}/"]


def test_sql_reads_the_samples_of_results_with_whose_weights_they_are(store: Store) -> None:
    for name, rewards in (("one", [1.0, 0.0]), ("other", [1.0])):
        with claimed(store, KEY.model_copy(update={"weights": hashlib.sha256(name.encode()).hexdigest()})) as claim:
            attempt = claim.attempt()
            empty = EVALUATED.empty_table().to_pydict()
            rows = [
                dict.fromkeys(empty) | {"prompt_index": index, "reward": reward} for index, reward in enumerate(rewards)
            ]
            table = pa.Table.from_pylist(rows, pa.schema([field.with_nullable(True) for field in EVALUATED]))
            claim.commit(
                attempt,
                outputs=(attempt.write_table("samples.parquet", table),),
                metrics={"score": sum(rewards) / len(rewards)},
                values={},
                origin={"run": name, "iteration": 3},
                timings={},
                started_at=0.0,
                environment=Environment(device="cpu", threads=1),
            )
    query = "SELECT run, iteration, dtype, score, avg(reward), count(*) FROM evaluations GROUP BY ALL ORDER BY run"
    found = [tuple(row.values()) for row in open_query(store).sql(query).to_pylist()]
    assert found == [("one", 3, "float32", 0.5, 0.5, 2), ("other", 3, "float32", 1.0, 1.0, 1)]
