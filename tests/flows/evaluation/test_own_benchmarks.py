"""A run's own evaluations and `evals/`: what either has evaluated the other finds, and nothing is sampled twice."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from cairn.configs.schema.evaluation import EngineOptions
from cairn.configs.schema.run import RunConfig
from cairn.flows.cli import app
from cairn.flows.evaluation.benchmarks import benchmarks_of, own_benchmarks, sampled_by_the_run
from cairn.flows.evaluation.evaluating import EvaluationResult, evaluate_models
from cairn.flows.evaluation.models import benchmarks_of_run, models_of
from cairn.flows.iteration import iteration
from cairn.storage.evals import claimant, folders, read_samples
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import EVALUATED, MEASURED
from cairn.storage.opening import open_store
from cairn.storage.store.store import Store
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.evaluation.evaluate import engines_environment, evaluate
from tests.local_fleet import LocalFleet
from tests.quantized_models import into_fp8
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

INITIAL = "heldout-v000000"
BROKEN = """
def grade(response, label, metadata):
    if int(label) >= 1:
        raise RuntimeError("no judge today")
    return 1.0
"""


class Killed(BaseException):
    """The driver's end."""


def config_of(assets: Path, **sections: dict[str, Any]) -> RunConfig:
    """Two draws of each of four prompts, rewarded by thirds and the like, which have no end in binary."""
    benchmark = {"name": "heldout", "path": str(assets / "heldout.jsonl"), "max_response_len": 6}
    evaluated = {"eval_interval": 1, "benchmarks": [{**benchmark, "n_samples_per_eval_prompt": 2}]}
    return tiny_config(assets, eval=evaluated, **sections)


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    return config_of(tiny_assets)


@pytest.fixture(scope="module")
def fleet(config: RunConfig) -> LocalFleet:
    return LocalFleet(config)


@pytest.fixture(scope="module")
def driven(config: RunConfig, fleet: LocalFleet, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, pa.Table]:
    """A store with a run that has done an iteration, and what it committed of the initial weights."""
    folder = tmp_path_factory.mktemp("driven")
    with tiny_context(str(folder), config, fleet=fleet) as (run, _):
        iteration(run, DirectSteps(run), 0)
        return run.ledger.store, run.read(run.committed(0, Step.EVAL, INITIAL))


@pytest.fixture
def requested(fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The samples that the run's engine was asked for."""
    engine, found = fleet.rollout[0], list[object]()
    generate = engine.generate_samples

    def counted(samples: Any, *rest: Any) -> Iterator[Any]:
        found.extend(sample.key for sample in samples)
        return generate(samples, *rest)

    monkeypatch.setattr(engine, "generate_samples", counted)
    return found


def evaluated(store: Store, place: str) -> EvaluationResult:
    """What `cairn eval PLACE heldout` finds."""
    own = benchmarks_of_run(store, place)
    (found,) = evaluate_models(store, models_of(store, place), benchmarks_of(["heldout"], own=own))
    return found


def initial(run: RunContext) -> Commit:
    return evaluate(run, 0, INITIAL, None, name="heldout")


def results_of(store: Store) -> list[str]:
    return list(folders(store))


def same(one: Commit, rows: pa.Table, other: Commit, other_rows: pa.Table) -> bool:
    """Whether two steps committed the same, bit for bit, but for what was measured and where it came from."""
    equal = (one.metrics, one.environment) == (other.metrics, other.environment)
    return equal and rows.equals(other_rows)


def test_stop_strings_end_the_responses_of_a_run_and_of_its_benchmarks(
    tiny_assets: Path, config: RunConfig, tmp_path: Path
) -> None:
    stopping = config_of(tiny_assets, rollout={"num_rollout": 1, "rollout_stop": ("e", "t", "<|im_st")})
    with tiny_context(str(tmp_path), stopping) as (run, _):
        iteration(run, DirectSteps(run), 0)
        commits = [one for one in run.ledger.commits(0) if one.step in (Step.ROLLOUT, Step.EVAL)]
        stopped = {Step.ROLLOUT: 0, Step.EVAL: 0}
        for commit in commits:
            for row in run.read(commit).to_pylist():
                before, text = (run.tokenizer.decode(ids) for ids in (row["response_ids"][:-1], row["response_ids"]))
                assert not any(string in before for string in stopping.rollout.rollout_stop)
                if any(string in text for string in stopping.rollout.rollout_stop):
                    assert row["finish_reason"] == "stop"
                    stopped[commit.step] += 1
        assert all(stopped.values())
        settings = [own_benchmarks(one)["heldout"].questions(run.tokenizer).settings for one in (config, stopping)]
        assert dict(settings[1]) == {**settings[0], "stop_strings": ["e", "t", "<|im_st"]}
        assert not evaluated(run.ledger.store, "tiny@0").computed


@pytest.mark.parametrize("rounded", [False, True])
def test_samples_of_servers_that_hold_fp8_are_no_result_of_the_weights(
    tiny_assets: Path, fleet: LocalFleet, tmp_path: Path, rounded: bool
) -> None:
    served = shutil.copytree(tiny_assets / "model", tmp_path / "served")
    if rounded:
        into_fp8(served)
    config = config_of(tiny_assets, rollout={"engine": "sglang", "model_path": str(served)})
    with tiny_context(str(tmp_path / "store"), config, fleet=fleet) as (run, _):
        store, origin = run.ledger.store, {"run": run.ledger.run, "iteration": None, "weight_version": 0}
        assert run.read(initial(run)).num_rows
        assert bool(results_of(store)) != rounded
        own = own_benchmarks(config)["heldout"]
        questions, options = own.questions(run.tokenizer), EngineOptions.of_run(config.rollout, {})
        assert (sampled_by_the_run(store, origin, own, questions, options) is None) == rounded


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(("place", "shard"), [("tiny@initial", INITIAL), ("tiny@0", "heldout-v000001")])
def test_what_a_run_has_evaluated_is_found(driven: tuple[Store, pa.Table], place: str, shard: str) -> None:
    store, _ = driven
    found = evaluated(store, place)
    assert not found.computed
    rows = read_samples(store, found.result)
    commit = Ledger.open(store, "tiny").find(0, Step.EVAL, shard)
    assert commit is not None
    assert rows.schema.equals(EVALUATED)
    assert found.result.adopted == f"tiny/000000/eval.{shard}"
    assert all(len(row["log_probs"]) == len(row["response_ids"]) > 0 for row in rows.to_pylist())
    metrics = found.result.metrics
    assert metrics["score"] == commit.metrics["heldout"] == pytest.approx(sum(rows["reward"].to_pylist()) / 8)
    assert metrics["interval_low"] < metrics["score"] < metrics["interval_high"]
    assert (metrics["questions"], metrics["n"]) == (4, 2)


@pytest.mark.parametrize(
    "said", [("-n", "9"), ("--seed", "7"), ("--set", "sampling.temperature=0.5"), ("--data", "heldout=rows.jsonl")]
)
def test_what_would_change_nothing_of_a_runs_own_benchmark_is_refused(
    driven: tuple[Store, pa.Table], said: tuple[str, str]
) -> None:
    ended = CliRunner().invoke(app, ["eval", "tiny@0", "heldout", *said, "--store", driven[0].url])
    assert (ended.exit_code, "'heldout' is a benchmark of the run" in ended.stderr) == (2, True), ended.output


def test_another_run_of_the_store_takes_the_result_and_commits_what_it_would_have_computed(
    driven: tuple[Store, pa.Table], config: RunConfig, fleet: LocalFleet, requested: list[object]
) -> None:
    store, rows = driven
    first = Ledger.open(store, "tiny").find(0, Step.EVAL, INITIAL)
    assert first is not None
    with tiny_context(store.url, config, name="second", fleet=fleet) as (run, events):
        commit = initial(run)
        assert same(commit, run.read(commit), first, rows)
    assert requested == []
    assert first.values == {"benchmark": "heldout"}
    assert commit.values["found"] in results_of(store)
    (messages,) = (event.text for event in events if isinstance(event, Message))
    assert "evaluated for run tiny; nothing is sampled" in messages


def test_a_run_takes_what_was_evaluated_apart_from_it_and_it_is_what_the_run_would_have_computed(
    driven: tuple[Store, pa.Table], config: RunConfig, fleet: LocalFleet, requested: list[object], tmp_path: Path
) -> None:
    first = Ledger.open(driven[0], "tiny").find(0, Step.EVAL, INITIAL)
    assert first is not None
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        apart = evaluated(run.ledger.store, "tiny@initial")
        commit = initial(run)
        assert (apart.computed, apart.result.adopted, requested) == (True, None, [])
        assert "found" in commit.values
        assert same(commit, run.read(commit), first, driven[1])


def test_who_is_killed_between_result_and_commit_finds_the_result_and_grades_nothing_again(
    driven: tuple[Store, pa.Table],
    config: RunConfig,
    fleet: LocalFleet,
    requested: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise Killed

    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _), monkeypatch.context() as patch:
        patch.setattr(Ledger, "commit", killed)
        with pytest.raises(Killed):
            initial(run)
        assert len(results_of(run.ledger.store)) == 1
    del requested[:]
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        commit = initial(run)
        assert (requested, "found" in commit.values, run.read(commit).equals(driven[1])) == ([], True, True)


def test_what_was_computed_elsewhere_is_not_taken_and_stays_as_it_was(
    driven: tuple[Store, pa.Table],
    config: RunConfig,
    fleet: LocalFleet,
    requested: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bits are claimed to be equal between equal environments only."""
    store, rows = driven
    before = evaluated(store, "tiny@initial").result
    with tiny_context(store.url, config, name="elsewhere", fleet=fleet) as (run, _):
        other = engines_environment(run).model_copy(update={"device": "another processor"})
        monkeypatch.setattr(fleet, "generating_environment", lambda engine: other)
        commit = initial(run)
        assert (len(requested), "found" in commit.values, run.read(commit).equals(rows)) == (8, False, True)
    assert evaluated(store, "tiny@initial").result == before


def test_a_run_waits_for_nobody_who_computes_the_same(
    config: RunConfig, fleet: LocalFleet, tmp_path: Path, requested: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who asks while the run computes waits for the run's result."""
    store = open_store(str(tmp_path))
    claimed: list[object] = []
    generate = fleet.rollout[0].generate_samples

    def inside(*args: Any) -> Iterator[Any]:
        if not claimed:
            (folder,) = results_of(store)
            claimed.append(claimant(store, folder))
            with tiny_context(str(tmp_path), config, name="beside", fleet=fleet) as (sibling, _):
                claimed.append(initial(sibling))
        return generate(*args)

    monkeypatch.setattr(fleet.rollout[0], "generate_samples", inside)
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        commit = initial(run)
    state, sibling = claimed
    assert isinstance(sibling, Commit)
    assert state is not None
    assert ("found" in commit.values, "found" in sibling.values, len(requested)) == (False, False, 16)
    assert evaluated(store, "tiny@initial").result.adopted == f"tiny/000000/eval.{INITIAL}"


@pytest.mark.usefixtures("no_engine")
def test_where_samples_failed_no_result_is_left_and_what_was_sampled_is_taken_over_to_be_graded(
    tiny_assets: Path, fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four answers have no grade; the samples are the run's, tokens and log-probs."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "judge.py").write_text(BROKEN)
    config = config_of(tiny_assets, reward={"custom_rm_path": f"{tmp_path / 'judge.py'}:grade"})
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        commit = initial(run)
        rows = run.read(commit)
    store = open_store(str(tmp_path))
    assert commit.metrics["heldout-failed_samples"] == 6
    (folder,) = results_of(store)
    with pytest.raises(FileNotFoundError):
        store.read(f"{folder}/result.json")
    found = evaluated(store, "tiny@initial")
    assert (found.computed, found.result.adopted) == (True, f"tiny/{commit.name}@{commit.digest}")
    taken = read_samples(store, found.result)
    for column in {"response_ids", "log_probs", "reward", "seed", "finish_reason", "response_text"} - MEASURED:
        own_result, run_result = taken[column].to_pylist(), rows[column].to_pylist()
        assert own_result == run_result, column
    assert not evaluated(store, "tiny@initial").computed
