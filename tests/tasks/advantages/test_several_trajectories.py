"""Samples of several trajectories, some with a prompt of their own: one row in every table, sequences of their own
where they are trained on."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.types.types import SamplingSupport, TrainBatch
from cairn.flows.iteration import iteration
from cairn.flows.reading.samples import iteration_samples
from cairn.flows.report.data import read_samples, read_tokens
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.schemas import EVAL, MEASURED, ROLLOUT, TRAJECTORIES, TRAJECTORY_PROMPTS
from cairn.storage.upkeep.verification import verify
from cairn.tasks.batch.batch import arrays, trained_shards
from cairn.tasks.batch.sequences import join_by_sample, split_trajectories
from cairn.tasks.batch.source import train_batch
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.selection import last_selection
from cairn.tasks.evaluation.evaluate import evaluate
from cairn.tasks.generation.groups import RowFormat, sample_table, unfinished_group, without_unused
from tests.local_fleet import LocalFleet, dying_after_samples
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

CODE = """
from dataclasses import replace

from cairn import Segment, Trajectory


async def generate(ctx, sample):
    first = await ctx.sample(sample.prompt_ids)
    if sample.index == 0:
        return Trajectory([first])
    shared, note = replace(first, loss_mask=first.loss_mask * 0), Segment.given([5, 6, 7])
    second = await ctx.sample([*sample.prompt_ids, *first.ids, *note.ids], max_new_tokens=5)
    own = [40, 41, 42, 43] if sample.index == 2 else sample.prompt_ids
    third = await ctx.sample([*own, *note.ids], max_new_tokens=sample.index + 2)
    last = Trajectory([note, third], own)
    return [Trajectory([first]), Trajectory([shared, note, second]), last][: sample.index + 1]


async def once(ctx, sample):
    return [Trajectory([await ctx.sample(sample.prompt_ids)])]


async def asks_anew(ctx, sample):
    prompt = [40, 41, 42, 43]
    return Trajectory([await ctx.sample(prompt)], prompt, retold=sample.index)
"""

GRADER = """
def grade(sample):
    of_last = [segment for segment in sample.segments if segment.trajectory == sample.segments[-1].trajectory]
    if of_last:
        assert sum((segment.ids for segment in of_last), ()) == sample.response_ids
        assert sample.response_with_special_tokens == "".join(segment.text for segment in of_last)
    return sum(sample.response_ids) % 7
"""


@pytest.fixture
def config(tiny_assets: Path, tmp_path: Path) -> RunConfig:
    """With scores, and with two optimizer steps."""
    (tmp_path / "several.py").write_text(CODE)
    (tmp_path / "last.py").write_text(GRADER)
    benchmark = {
        "name": "held",
        "path": str(tiny_assets / "heldout.jsonl"),
        "n_samples_per_eval_prompt": 3,
        "max_response_len": 6,
    }
    return tiny_config(
        tiny_assets,
        rollout={
            "custom_generate_function_path": f"{tmp_path / 'several.py'}:generate",
            "num_rollout": 1,
            "rollout_top_k": 40,
        },
        reward={"custom_rm_path": f"{tmp_path / 'last.py'}:grade"},
        algorithm={"use_rollout_logprobs": False, "use_tis": True, "advantage_estimator": "ppo"},
        training={"num_steps_per_rollout": 2, "lr": 1e-3, "num_threads": 1},
        eval={"eval_interval": 1, "skip_eval_before_train": True, "benchmarks": [benchmark]},
    )


def rows_of(run: RunContext, index: int) -> dict[tuple[int, int], dict]:
    table = run.read(run.committed(index, Step.ROLLOUT, "00-000"))
    return {(row["group_id"], row["sample_index"]): row for row in table.to_pylist()}


def whole_batch(run: RunContext, index: int) -> TrainBatch:
    selection = last_selection(run, index)
    scores, advantages = (run.committed(index, step) for step in (Step.SCORE, Step.ADVANTAGE))
    return train_batch(run, selection, trained_shards(run, selection)[0], advantages, scores)


@pytest.mark.proof
def test_a_run_of_them_that_is_killed_in_between_ends_in_the_undisturbed_weights(
    config: RunConfig, tmp_path: Path
) -> None:
    with tiny_context(str(tmp_path / "whole"), config) as (whole, _):
        iteration(whole, DirectSteps(whole), 0)
        expected, table = train_digests(whole, [0]), whole.read(whole.committed(0, Step.ROLLOUT, "00-000"))
        check_batch_of(whole, 0)
        verify(whole.ledger)
        shown = {(sample.group_id, sample.sample_index): sample for sample in iteration_samples(whole.ledger, 0)}
    for key, row in rows_of(whole, 0).items():
        last = row["response_ids"][-row["trajectories"][-1] :] if row["trajectories"] else row["response_ids"]
        assert row["response_text"] == whole.tokenizer.decode(last, skip_special_tokens=True) == shown[key].response
        assert shown[key].reward == sum(last) % 7
        assert shown[key].response_tokens == len(row["response_ids"])

    check_report_of(whole, 0)

    fleet = dying_after_samples(LocalFleet(config), 13)  # of 16: in whatever order they end, a group is complete
    store = str(tmp_path / "killed")
    with tiny_context(store, config, fleet=fleet) as (run, _), pytest.raises(KeyboardInterrupt):
        iteration(run, DirectSteps(run), 0)
    with tiny_context(store, config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        assert run.committed(0, Step.ROLLOUT, "00-000").metrics["recovered_groups"] > 0
        resumed = run.read(run.committed(0, Step.ROLLOUT, "00-000"))
        assert resumed.drop_columns([*MEASURED]).equals(table.drop_columns([*MEASURED]))
        assert train_digests(run, [0]) == expected
        check_continued(run, resumed)


def check_report_of(run: RunContext, index: int) -> None:
    """It shows a log-prob of the tokens that the policy sampled, and of no others."""
    samples = read_samples(run.ledger, lambda *message: None)
    tokens = read_tokens(run.ledger, samples, range(samples.rows.num_rows), lambda *message: None)
    rows = [row for _, row in sorted(rows_of(run, index).items())]
    sampled = [
        segment["call"] is not None
        for row in rows
        for segment in row["segments"] or [{"call": "", "tokens": len(row["response_ids"])}]
        for _ in range(segment["tokens"])
    ]
    assert not all(sampled)
    assert tokens.column("log_prob").is_valid().to_pylist() == sampled


def check_continued(run: RunContext, table: pa.Table) -> None:
    """Finished samples of a group that is continued stay as they were, also by a fork without the function."""
    rows = table.filter(pc.field("group_id") == 1).drop_columns([*MEASURED])
    group = unfinished_group(rows.append_column("seconds", pa.array([0.0] * rows.num_rows)), {})
    plain = run.config.rollout.model_copy(update={"custom_generate_function_path": "single_turn"})
    for config in (run.config, run.config.model_copy(update={"rollout": plain})):
        format = RowFormat.of(run.seen_as(config))
        written = sample_table(format, run.tokenizer, "rollout:0", {1: group}, group.finished())
        assert without_unused(written).drop_columns([*MEASURED]).equals(rows.combine_chunks())


def check_batch_of(run: RunContext, index: int) -> None:
    """Its sequences are the trajectories of the samples; what steps write of a sample has its tokens."""
    rows, batch = rows_of(run, index), whole_batch(run, index)
    estimated = run.read(run.committed(index, Step.ADVANTAGE))
    scored = run.read(run.committed(index, Step.SCORE))
    keys = list(zip(*(estimated.column(name).to_pylist() for name in ("group_id", "sample_index")), strict=True))
    assert [len(rows[key]["trajectories"] or [0]) for key in keys[:4]] == [1, 2, 3, 3]
    assert batch.samples is not None
    assert batch.kept is not None
    assert batch.advantages is not None
    assert batch.old_log_probs is not None
    assert batch.values is not None
    number = 0
    for sample, key in enumerate(keys):
        row = rows[key]
        ends = np.cumsum([0, *(row["trajectories"] or [len(row["response_ids"])])]).tolist()
        assert ends[-1] == len(row["response_ids"]) == len(scored.column("values")[sample])
        own = row["trajectory_prompts"] or [None] * (len(ends) - 1)
        assert [one is not None for one in own] == [key[1] == 2 and place == 2 for place in range(len(own))]
        for (start, end), prompt in zip(pairwise(ends), own, strict=True):
            ids = (prompt or row["prompt_ids"]) + row["response_ids"][start:end]
            assert batch.input_ids[number].tolist() == ids
            assert (batch.samples[number], batch.response_lengths[number]) == (sample, end - start)
            assert batch.loss_mask[number].tolist() == row["loss_mask"][start:end]
            assert batch.advantages[number].tolist() == estimated.column("advantages")[sample].as_py()[start:end]
            assert batch.kept[number].first_without(np.asarray(ids[len(ids) - end + start :])) is None
            # Scored as a sequence by itself, a token has the log-prob that it was sampled with.
            mask = batch.loss_mask[number].astype(bool)
            sampled = np.asarray(row["log_probs"][start:end], np.float32)
            np.testing.assert_allclose(batch.old_log_probs[number][mask], sampled[mask], atol=1e-4)
            number += 1
    assert number == len(batch)
    (first, *_), (second, *_) = arrays(scored, "log_probs"), join_by_sample(batch, batch.old_log_probs)
    assert first.tolist() == second.tolist()


def test_an_evaluation_grades_the_last_of_them(config: RunConfig, tmp_path: Path) -> None:
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        table = run.read(evaluate(run, 0, "held-v000000", None, name="held"))
    assert table.column_names == [*EVAL.names, TRAJECTORIES.name, TRAJECTORY_PROMPTS.name]
    for row in table.to_pylist():
        assert len(row["trajectories"] or [0]) == row["sample_index"] + 1
        last = row["response_ids"][-row["trajectories"][-1] :] if row["trajectories"] else row["response_ids"]
        assert row["response_text"] == run.tokenizer.decode(last, skip_special_tokens=True)
        assert row["reward"] == sum(last) % 7


def test_where_each_sample_has_one_the_tables_are_what_they_are_without(config: RunConfig, tmp_path: Path) -> None:
    path = config.rollout.custom_generate_function_path.replace(":generate", ":once")
    once = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"custom_generate_function_path": path})}
    )
    with tiny_context(str(tmp_path / "store"), once) as (run, _):
        iteration(run, DirectSteps(run), 0)
        table = run.read(run.committed(0, Step.ROLLOUT, "00-000"))
        assert [name for name in table.column_names if name not in ROLLOUT.names] == ["kept_token_ids"]
        assert TRAJECTORIES.name not in table.column_names
        assert whole_batch(run, 0).samples is None


def test_one_trajectory_may_have_a_prompt_of_its_own(config: RunConfig, tmp_path: Path) -> None:
    path = config.rollout.custom_generate_function_path.replace(":generate", ":asks_anew")
    anew = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"custom_generate_function_path": path})}
    )
    with tiny_context(str(tmp_path / "store"), anew) as (run, _):
        iteration(run, DirectSteps(run), 0)
        rows, batch = rows_of(run, 0), whole_batch(run, 0)
        rollout = run.committed(0, Step.ROLLOUT, "00-000")
    assert rollout.metrics["prompt_tokens"] == 4 * len(rows)
    assert rollout.metrics["sampled_tokens"] == rollout.metrics["response_tokens"]
    assert rollout.metrics["retold_tokens"] == len(rows) / 4 * (0 + 1 + 2 + 3)
    assert [rows[key]["retold_tokens"] for key in sorted(rows)][:4] == [None, 1, 2, 3]
    for row in rows.values():
        assert row["trajectories"] == [len(row["response_ids"])]
        assert row["trajectory_prompts"] == [[40, 41, 42, 43]] != [row["prompt_ids"]]
    responses = {tuple([40, 41, 42, 43] + row["response_ids"]) for row in rows.values()}
    assert {tuple(ids.tolist()) for ids in batch.input_ids} <= responses
    assert batch.old_log_probs is not None
    assert batch.rollout_log_probs is not None
    for scored, sampled in zip(batch.old_log_probs, batch.rollout_log_probs, strict=True):
        np.testing.assert_allclose(scored, sampled, atol=1e-4)


def test_every_field_of_a_batch_is_cut_and_put_together_again() -> None:
    supports = [SamplingSupport.of([[1], [], [2, 3]]), SamplingSupport.of([[4]])]
    batch = TrainBatch(
        [np.arange(5), np.arange(10, 13)],
        [3, 1],
        [np.array([1, 0, 1]), np.array([1])],
        values=[np.array([0.1, 0.2, 0.3]), np.array([0.4])],
        groups=[8, 9],
        kept=supports,
    )
    cut = split_trajectories(batch, [[1, 2], None])
    assert [ids.tolist() for ids in cut.input_ids] == [[0, 1, 2], [0, 1, 3, 4], [10, 11, 12]]
    assert (cut.response_lengths, cut.groups, cut.samples) == ([1, 2, 1], [8, 8, 9], [0, 0, 1])
    assert [mask.tolist() for mask in cut.loss_mask] == [[1], [0, 1], [1]]
    assert cut.kept is not None
    assert [one.counts.tolist() for one in cut.kept] == [[1], [0, 2], [1]]
    assert cut.advantages is None
    assert cut.values is not None
    assert [one.tolist() for one in join_by_sample(cut, cut.values)] == [[0.1, 0.2, 0.3], [0.4]]
    anew = split_trajectories(batch, [[1, 2], None], [[None, [20]], None])
    assert [ids.tolist() for ids in anew.input_ids] == [[0, 1, 2], [20, 3, 4], [10, 11, 12]]
