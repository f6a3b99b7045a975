"""Sampling by top-p and top-k: what tokens were drawn from is committed with them and trained within."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.types.types import SamplingSupport
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import ROLLOUT, SUPPORT, rollout_schema
from cairn.storage.logs.sample_log import SampleLog
from cairn.storage.opening import open_store
from cairn.tasks.batch.batch import sampling_supports, support_column
from cairn.tasks.batch.source import train_batch
from cairn.tasks.durable.selection import last_selection
from tests.storage.builders import rollout_table
from tests.tasks.generation.test_partial_rollout import PARTIAL
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

CUT = {"rollout_top_p": 0.7, "rollout_top_k": 40, "rollout_temperature": 0.8}


def run_iterations(store: Path, config: RunConfig, count: int) -> list[str | None]:
    with tiny_context(str(store), config) as (run, _):
        for index in range(count):
            iteration(run, DirectSteps(run), index)
        return train_digests(run, range(count))


def cut_config(assets: Path, **rollout: object) -> RunConfig:
    return tiny_config(
        assets,
        rollout={"num_rollout": 3, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "rollout_max_response_len": 12}
        | CUT
        | rollout,
        algorithm={"use_rollout_logprobs": False, "use_tis": True, "use_kl_loss": True, "kl_loss_coef": 0.01},
        training={"lr": 1e-3, "num_threads": 1, "num_steps_per_rollout": 2},
    )


@pytest.mark.proof
def test_a_run_trains_within_what_was_kept_and_goes_on_after_a_kill_to_the_same_state(
    tiny_assets: Path, tmp_path: Path
) -> None:
    config = cut_config(tiny_assets)
    undisturbed = run_iterations(tmp_path / "undisturbed", config, 2)
    run_iterations(tmp_path / "resumed", config, 1)
    assert run_iterations(tmp_path / "resumed", config, 2) == undisturbed
    with tiny_context(str(tmp_path / "resumed"), config) as (run, _):
        (rollout,) = [commit for commit in run.ledger.commits(1) if commit.step is Step.ROLLOUT]
        for row in run.read(rollout).to_pylist():
            assert len(row[SUPPORT.name]) == len(row["response_ids"])
            assert all(token in support for token, support in zip(row["response_ids"], row[SUPPORT.name], strict=True))
            assert all(1 <= len(support) <= 40 for support in row[SUPPORT.name])
        batch = train_batch(run, last_selection(run, 1), [rollout])
        assert batch.kept is not None
        (train,) = [commit for commit in run.ledger.commits(0) if commit.step is Step.TRAIN]
        assert train.metrics["train_rollout_logprob_abs_diff_max"] < 1e-5
        assert train.metrics["tis"] == pytest.approx(1, abs=1e-5)


def test_a_run_without_truncation_writes_the_tables_that_it_always_wrote(tiny_assets: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_assets)
    run_iterations(tmp_path, config, 1)
    with tiny_context(str(tmp_path), config) as (run, _):
        (rollout,) = [commit for commit in run.ledger.commits(0) if commit.step is Step.ROLLOUT]
        assert run.read(rollout).schema.equals(ROLLOUT)
        assert train_batch(run, last_selection(run, 0), [rollout]).kept is None


def test_a_sample_that_is_continued_keeps_what_its_first_tokens_were_drawn_from(
    tiny_assets: Path, tmp_path: Path
) -> None:
    config = cut_config(tiny_assets, **PARTIAL)
    with tiny_context(str(tmp_path), config) as (run, _):
        parts: dict[tuple[int, int], dict[str, list[list[int]]]] = {}
        continued = 0
        for index in range(3):
            iteration(run, DirectSteps(run), index)
            for commit in [commit for commit in run.ledger.commits(index) if commit.step is Step.ROLLOUT]:
                for row in run.read(commit).to_pylist():
                    assert len(row[SUPPORT.name]) == len(row["response_ids"])
                    assert all(
                        token in support for token, support in zip(row["response_ids"], row[SUPPORT.name], strict=True)
                    )
                    before = parts.pop((row["group_id"], row["sample_index"]), None)
                    if before is not None:
                        assert row[SUPPORT.name][: len(before[SUPPORT.name])] == before[SUPPORT.name]
                        continued += 0 < len(before[SUPPORT.name]) < len(row[SUPPORT.name])
                    if row["status"] == "aborted":
                        parts[row["group_id"], row["sample_index"]] = row
    assert continued > 0, "the witness that a sample was continued after tokens"


def test_the_column_says_what_was_kept_of_rows_that_were_sliced_joined_and_written_without_it() -> None:
    supports = [SamplingSupport.of([[4, 2], [], [7]]), SamplingSupport.whole(0), SamplingSupport.of([[1]])]
    responses = [np.zeros(3), np.zeros(0), np.zeros(1)]
    cut = pa.table({SUPPORT.name: support_column(supports)}, pa.schema([SUPPORT]))
    without = pa.table({SUPPORT.name: pa.nulls(2, SUPPORT.type)}, pa.schema([SUPPORT]))
    joined = pa.concat_tables([without, cut.slice(2), cut.slice(0, 2)]).combine_chunks()
    found = sampling_supports(joined, [np.zeros(5), np.zeros(2), responses[2], responses[0], responses[1]])
    assert found is not None
    expected = [SamplingSupport.whole(5), SamplingSupport.whole(2), supports[2], supports[0], supports[1]]
    assert [(one.ids.tolist(), one.counts.tolist()) for one in found] == [
        (one.ids.tolist(), one.counts.tolist()) for one in expected
    ]
    assert sampling_supports(without, [np.zeros(5), np.zeros(2)]) is None


def test_finished_groups_survive_a_kill_with_what_they_were_drawn_from(tmp_path: Path) -> None:
    ledger = Ledger.create(open_store(str(tmp_path)), "cut", {})
    ledger.acquire()
    schema = rollout_schema(cut=True)
    plain = rollout_table([0], tokens=3)
    table = plain.append_column(SUPPORT, support_column([SamplingSupport.of([[1], [2, 3], []])] * plain.num_rows))
    with SampleLog(ledger.attempt(0, Step.ROLLOUT, "00-000"), "digest", schema=schema) as log:
        log.append(table)
    with SampleLog(ledger.attempt(0, Step.ROLLOUT, "00-000"), "digest", schema=schema) as log:
        assert log.recover().equals(table)
