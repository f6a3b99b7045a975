"""Partial rollout by tokens: what is cut off depends on the samples alone: a rollout comes out the same always."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, count
from pathlib import Path

import pyarrow as pa
import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.types.types import Completion, GenerateRequest
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.schemas import MEASURED
from cairn.storage.upkeep.verification import verify
from cairn.tasks.durable.context import RunContext
from tests.local_fleet import LocalFleet, calls
from tests.mistakes import mistakes
from tests.tasks.generation.test_partial_rollout import (
    BATCH,
    LENGTH,
    PARTIAL,
    Dies,
    fleet_with,
    partial_config,
    refuses_two,
    sampled,
)
from tests.tiny_run import DirectSteps, tiny_context, train_digests

CUT, ITERATIONS = 8, 2
Made = tuple[list[str | None], list[pa.Table]]


def cut_config(assets: Path, **options: object) -> RunConfig:
    """Two samples a group, of which most end before the longest does."""
    stops = {"n_samples_per_prompt": 2, "rollout_stop_token_ids": tuple(range(3, 16)), "num_rollout": ITERATIONS}
    return partial_config(assets, cut_tokens=CUT, **(stops | options))


def made(run: RunContext) -> Made:
    """The states that were trained, and the samples of every rollout but for what was measured of them."""
    commits = [commit for index in range(ITERATIONS) for commit in run.ledger.commits(index)]
    tables = [run.read(commit).drop_columns([*MEASURED]) for commit in commits if commit.step is Step.ROLLOUT]
    return train_digests(run, range(ITERATIONS)), tables


def drive(store: Path, config: RunConfig, fleet: LocalFleet | None = None) -> Made:
    """A run to its end, from where it stands."""
    with tiny_context(str(store), config, fleet=fleet) as (run, _):
        for index in range(ITERATIONS):
            iteration(run, DirectSteps(run), index)
        assert [finding for one in verify(run.ledger) for finding in one.findings] == []
        return made(run)


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    return cut_config(tiny_assets)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture(scope="module")
def undisturbed(store: Path, config: RunConfig) -> Made:
    return drive(store, config)


def test_all_that_is_open_has_come_equally_far_when_enough_has_ended(
    store: Path, config: RunConfig, undisturbed: object
) -> None:
    with tiny_context(str(store), config) as (run, _):
        carried: dict[tuple[int, int], int] = {}
        cut_off = continued = 0
        for commit in (one for i in range(ITERATIONS) for one in run.ledger.commits(i) if one.step is Step.ROLLOUT):
            rows = run.read(commit).to_pylist()
            new = {
                (row["group_id"], row["sample_index"]): len(row["response_ids"])
                - carried.get((row["group_id"], row["sample_index"]), 0)
                for row in rows
            }
            parts = [row for row in rows if row["status"] == "aborted"]
            rounds = {new[row["group_id"], row["sample_index"]] / CUT for row in parts}
            assert len(rounds) == 1
            (end,) = rounds
            assert end == int(end)
            last = Counter[int]()
            for (group, _), tokens in new.items():
                last[group] = max(last[group], -(-tokens // CUT))
            ended = {row["group_id"] for row in rows} - {row["group_id"] for row in parts}
            counted = sorted(last[group] for group in ended)
            assert len(ended) >= BATCH
            assert counted[BATCH - 1] == end == max(counted), "not a round earlier, nor later"
            assert commit.values["batch_invariant"] is True
            of_prompts = [
                sum(len(row["prompt_ids"]) + len(row["response_ids"]) - tokens + done * CUT for done in range(rounds))
                for row in rows
                if (tokens := new[row["group_id"], row["sample_index"]])
                for rounds in [-(-tokens // CUT)]
            ]
            assert commit.metrics["prompt_tokens"] == sum(of_prompts)
            cut_off += len(parts)
            continued += commit.metrics["continued_groups"] > 0
            carried = {(row["group_id"], row["sample_index"]): len(row["response_ids"]) for row in rows}
        assert cut_off > 0
        assert continued > 0
        assert any(len(set(row["weight_versions"])) > 1 for row in sampled(run, ITERATIONS))


def test_it_comes_out_the_same_in_other_company(config: RunConfig, undisturbed: Made, tmp_path: Path) -> None:
    other = config.rollout.model_copy(update={"max_running_requests": 4})
    assert drive(tmp_path, config.model_copy(update={"rollout": other})) == undisturbed


def dying_amid(fleet: LocalFleet, round: int) -> LocalFleet:
    """Have the driver die when its engine has returned half of the requests in a round of tokens."""
    engine, rounds = fleet.rollout[0], count(1)
    generate = engine.generate

    def dying(requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        left = len(requests) // 2 if next(rounds) == round else None
        for completion in chain.from_iterable(generate(requests)):
            yield [completion]
            left = None if left is None else left - 1
            if left == 0:
                raise Dies

    engine.open = calls(dying)  # type: ignore[method-assign]
    return fleet


@pytest.mark.proof
def test_a_driver_that_is_killed_in_any_round_is_succeeded_to_the_same_samples_and_weights(
    config: RunConfig, undisturbed: Made, tmp_path: Path
) -> None:
    for round in (1, 3, 5, 7):  # the first iteration takes 5, each time for what has not ended; the next continues
        with pytest.raises(Dies):
            drive(tmp_path, config, dying_amid(LocalFleet(config), round))
    assert drive(tmp_path, config) == undisturbed
    with tiny_context(str(tmp_path), config) as (run, _):
        first, second = (run.committed(index, Step.ROLLOUT, "00-000") for index in range(ITERATIONS))
        assert first.metrics["recovered_groups"] >= BATCH, "enough had ended when it was killed in its last round"
        assert 0 < second.metrics["recovered_groups"] < BATCH


def test_groups_that_failed_are_not_counted(config: RunConfig, tmp_path: Path) -> None:
    with tiny_context(str(tmp_path), config, fleet=fleet_with(config, refuses_two)) as (run, _):
        iteration(run, DirectSteps(run), 0)
        rows = run.read(run.committed(0, Step.ROLLOUT, "00-000")).to_pylist()
        assert {row["group_id"] for row in rows if row["error"]} == {0, 1}
        open_or_failed = {row["group_id"] for row in rows if row["error"] or row["status"] == "aborted"}
        assert len({row["group_id"] for row in rows} - open_or_failed) >= BATCH


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partial_rollout": False}, r"cut_tokens \(8\) has no effect while rollout.partial_rollout is false"),
        (
            {"custom_generate_function_path": "turns.py:generate"},
            r"while rollout.custom_generate_function_path is turns.py",
        ),
        ({"cut_tokens": LENGTH}, r"cut_tokens \(60\) has no effect while no response is longer than .*; lower it"),
    ],
)
def test_where_it_would_cut_nothing_it_is_said(options: dict[str, object], message: str) -> None:
    rollout = {**PARTIAL, "cut_tokens": CUT, **options}
    assert re.search(message, mistakes(rollout=rollout, algorithm={"use_tis": True}))
