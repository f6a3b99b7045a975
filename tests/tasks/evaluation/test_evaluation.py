"""A benchmark's score is over all of its samples, drawn as no other samples are."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.run import RunConfig
from cairn.engines.types.types import Completion, GenerateRequest, SamplingParams
from cairn.flows.events import IterationDone
from cairn.flows.reading.metrics import eval_metrics
from cairn.flows.reading.samples import benchmark_scores
from cairn.flows.reading.views import run_status
from cairn.flows.watching.progress import Progress
from cairn.storage.ledger import layout
from cairn.storage.ledger.schemas import GRADED_EVAL
from cairn.storage.upkeep.collector import collect, garbage
from cairn.tasks.data.prompts import PromptRow
from cairn.tasks.evaluation.benchmarks import measure
from cairn.tasks.evaluation.compute import evaluated_samples
from cairn.tasks.evaluation.evaluate import evaluate
from cairn.tasks.evaluation.questions import Questions, eval_seed
from cairn.tasks.generation.groups import sample_seed
from cairn.tasks.grading.graded import GradedSample
from tests.local_fleet import LocalFleet, calls
from tests.requests import grouped
from tests.tiny_run import tiny_config, tiny_context

GRADER = """
def grade(response, label, metadata):
    if int(label) >= 1:
        raise RuntimeError("no judge today")
    return 1.0
"""


class Killed(BaseException):
    """The driver's end."""


@pytest.mark.parametrize(
    ("rewards", "score"),
    [
        ([1.0, 1.0, *[None] * 6], 0.25),  # two right of eight
        ([1.0, 0.0, 1.0, 1.0], 0.75),
        ([1.0, -1.0, None, None], -0.5),  # wrong is -1 here
        ([2.0, 1.0, None], 1.0),  # and 0 here
        ([None, None], 0.0),
    ],
)
def test_failed_samples_are_wrong_answers_in_the_mean(rewards: list[float | None], score: float) -> None:
    samples = [GradedSample("", None, prompt_index=index, reward=reward) for index, reward in enumerate(rewards)]
    assert measure("mean", samples) == {"score": score}


@pytest.mark.parametrize("returned", ["None", "{'mean': 1.0}", "{'score': 'high'}", "float('nan')", "samples"])
def test_a_metric_that_returns_something_else_is_named(tmp_path: Path, returned: str) -> None:
    (tmp_path / "mine.py").write_text(f"def mine(samples):\n    return {returned}\n")
    with pytest.raises(BadPlugin, match=r"mine' returned .*: let it return a number, or a mapping .*'score' among"):
        measure(f"{tmp_path / 'mine.py'}:mine", [GradedSample("", None, reward=1.0)])


def config_of(assets: Path, tmp_path: Path, *names: str) -> RunConfig:
    (tmp_path / "judge.py").write_text(GRADER)
    benchmarks = [{"name": name, "path": str(assets / "heldout.jsonl"), "max_response_len": 4} for name in names]
    return tiny_config(
        assets,
        reward={"custom_rm_path": f"{tmp_path / 'judge.py'}:grade"},
        eval={"eval_interval": 1, "benchmarks": benchmarks},
    )


def test_both_scores_are_committed_and_shown(tiny_assets: Path, tmp_path: Path) -> None:
    """One of the four held-out prompts is graded, and right."""
    config = config_of(tiny_assets, tmp_path, "heldout")
    with tiny_context(str(tmp_path), config) as (run, _):
        commit = evaluate(run, 0, "heldout-v000000", None, name="heldout")
        shown = eval_metrics([commit])[0]
        assert {name: shown[f"eval/heldout{name}"] for name in ("", "-graded", "-failed_samples")} == {
            "": 0.25, "-graded": 1.0, "-failed_samples": 3
        }  # fmt: skip
        ledger = run.ledger
    status = run_status(ledger.store, ledger.run).eval["heldout"]
    assert (status.first, status.first_graded, status.first_failed) == (0.25, 1.0, 3)
    assert benchmark_scores(ledger, config) == {"heldout": {0: 0.25}, "heldout, graded": {0: 1.0}}
    console = Console(file=io.StringIO(), width=100)
    with Progress(config, console) as progress:
        progress(IterationDone(0, (commit,)))
    assert "heldout 0.250 (3 failed; 1.000 without them) after 0 iterations" in console.file.getvalue()


@pytest.mark.parametrize(("metric", "kind"), [("mean", np.ndarray), ("mine.py:mine", tuple)])
def test_a_metric_gets_the_tokens_that_are_graded(metric: str, kind: type) -> None:
    """A metric of the user's gets them in a form that can be compared and hashed."""
    row = {"response_text": "", "prompt_index": 0, "sample_index": 0, "finish_reason": "stop", "status": "completed"}
    one = row | {"response_ids": [1, 2, 3, 4, 5], "trajectories": [3, 2]}  # the last trajectory is graded
    rows = pa.Table.from_pylist([one, row | {"sample_index": 1, "response_ids": []}], GRADED_EVAL)
    prompt = PromptRow(index=0, prompt="", prompt_text="", prompt_ids=(), label=None, metadata=None)
    questions = Questions("own", [prompt], 2, SamplingParams(max_new_tokens=5), 0, {}, {}, metric)
    samples = evaluated_samples(questions, rows)
    assert [(type(sample.response_ids), list(sample.response_ids), sample.length) for sample in samples] == [
        (kind, [4, 5], 2), (kind, [], 0)
    ]  # fmt: skip


def test_an_evaluation_draws_other_numbers_than_the_training_and_other_benchmarks(
    tiny_assets: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_assets, tmp_path, "one", "two")
    with tiny_context(str(tmp_path), config) as (run, _):
        commits = {name: evaluate(run, 0, f"{name}-v000000", None, name=name) for name in ("one", "two")}
        seeds = {name: run.read(commit)["seed"].to_pylist() for name, commit in commits.items()}
    assert seeds["one"] == [eval_seed(config.seed, "one", index, 0) for index in range(4)]
    training = {sample_seed(config.seed, 0, group, index) for group in range(32) for index in range(4)}
    assert len({*seeds["one"], *seeds["two"], *training}) == 4 + 4 + 32 * 4


def test_what_an_evaluation_has_generated_is_kept_when_its_driver_is_killed(tiny_assets: Path, tmp_path: Path) -> None:
    config = config_of(tiny_assets, tmp_path, "heldout")
    with tiny_context(str(tmp_path / "whole"), config) as (run, _):
        whole = run.read(evaluate(run, 0, "heldout-v000000", None, name="heldout"))

    fleet = LocalFleet(config)
    engine = fleet.rollout[0]
    generate, requested = engine.generate, list[int]()

    def two_groups(requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        first, second, *_ = grouped(requests)
        yield from generate(first + second)
        raise Killed

    def count(requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        requested.extend(group[0].request_id[0] for group in grouped(requests))
        return generate(requests)

    with tiny_context(str(tmp_path / "killed"), config, fleet=fleet) as (run, _):
        engine.open = calls(two_groups)  # type: ignore[method-assign]
        with pytest.raises(Killed):
            evaluate(run, 0, "heldout-v000000", None, name="heldout")
    with tiny_context(str(tmp_path / "killed"), config, fleet=fleet) as (run, _):
        engine.open = calls(count)  # type: ignore[method-assign]
        commit = evaluate(run, 0, "heldout-v000000", None, name="heldout")
        assert requested == [2, 3]
        assert run.read(commit).equals(whole)
        collect(run.ledger, garbage(run.ledger))
        assert len(run.ledger.store.find(layout.attempts("tiny", 0, "eval"))) == 1


def test_a_sample_without_a_response_has_no_length(tiny_assets: Path, tmp_path: Path) -> None:
    """Two of the four prompts are refused."""
    config = config_of(tiny_assets, tmp_path, "heldout")
    fleet = LocalFleet(config)
    engine: Any = fleet.rollout[0]
    generate = engine.generate

    def refuses_two(requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        return generate([replace(r, input_ids=[]) if r.request_id[0] in (1, 2) else r for r in requests])

    engine.open = calls(refuses_two)
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        commit = evaluate(run, 0, "heldout-v000000", None, name="heldout")
        rows = run.read(commit).to_pylist()
    lengths = [len(row["response_ids"]) for row in rows if row["prompt_index"] in (0, 3)]
    assert commit.metrics["eval/heldout/response_len/mean"] == sum(lengths) / 2 > 0
    ends = [row["finish_reason"] for row in rows if row["prompt_index"] in (0, 3)]
    assert commit.metrics["heldout-truncated_ratio"] == ends.count("length") / 2
    assert (commit.metrics["heldout"], commit.metrics["heldout-graded"]) == (0.25, 1.0)
