"""Every option that changes what a step makes is among what the step says it reads."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.digest import digest
from cairn.configs.engines import ENGINES
from cairn.configs.loader import LIST_ITEM, options
from cairn.configs.schema.run import RunConfig
from cairn.configs.slime import CUSTOM
from cairn.configs.view import CHANGES_NO_BITS, UndeclaredRead, is_covered
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.advantages.step import advantage
from cairn.tasks.durable.step import DurableStep
from cairn.tasks.generation.rollout import rollout
from cairn.tasks.selecting.filter import filter_groups
from cairn.tasks.steps import STEPS
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

UNREAD = CHANGES_NO_BITS | {
    "checkpoint": "what is kept, not what it is",
    "fleet": "where engines lie and how weights travel; what arrives is verified",
    "retry": "how often is tried what gives the same in the end",
    "approval": "before which iterations people are asked; the answer is in the ledger",
    "operations": "how a driver runs and ends",
    "recovery": "what a driver does about bits that differ",
    "tracking": "what is told to people",
    "eval.eval_interval": "which iterations have the step",
    "eval.skip_eval_before_train": "which iterations have the step",
    "rollout.num_epoch": "how many iterations there are, which num_rollout says too where a run is made",
    "rollout.num_engines": "each serves what was published, and that it does is verified",
    "rollout.min_num_engines": "which engines serve when, and each serves what was published",
    "rollout.num_data_workers": "each prompt is the same whichever thread makes it, and when",
    "rollout.num_episode_workers": "each sample is the same whichever worker runs its code",
    "rollout.async_buffer_size": "when prompts are admitted, and not which",
    "rollout.update_weights_interval": "which weights sample a token; it is recorded with each",
    "rollout.over_sampling_batch_size": "an argument of the step: how many groups a shard has",
    "rollout.shards_per_round": "an argument of the step: how groups are cut into shards",
    "training.global_batch_size": "follows from the samples of a batch and num_steps_per_rollout",
}
"""Options, or sections, that no step reads, and why their steps make the same all the same."""


def test_every_option_is_read_by_a_step_or_known_to_change_nothing_and_not_both() -> None:
    names = {option.name: option.name.partition(f".{LIST_ITEM}")[0] for option in options(RunConfig)}
    assert len(names) > 300
    read = {option for option, name in names.items() if any(is_covered(name, step.options) for step in STEPS.values())}
    read.add(CUSTOM)  # of steps that call a function written for slime
    unread = {option for option, name in names.items() if is_covered(name, tuple(UNREAD))}
    assert {"neither": sorted(names.keys() - read - unread), "both": sorted(read & unread)} == {
        "neither": [],
        "both": [],
    }


TRAINS = {Step.SCORE, Step.TRAIN, Step.CHECKPOINT, Step.SYNC}


READERS = {
    "rollout.num_gpus_per_engine": {Step.ROLLOUT, Step.EVAL},
    "rollout.external_urls": {Step.ROLLOUT, Step.EVAL},
    "rollout.server_groups": {Step.ROLLOUT, Step.EVAL},
    "rollout.max_running_requests": {Step.ROLLOUT, Step.EVAL},
    "training.num_gpus_per_rank": TRAINS,
    "training.lora.lora_alpha": TRAINS,
    "training.num_steps_per_rollout": {Step.ADVANTAGE, *TRAINS},
    "rollout.rollout_temperature": {Step.ROLLOUT, *TRAINS},
}


def test_what_an_engine_is_made_from_is_read_by_all_that_call_it() -> None:
    covered = {option: {step.name for step in STEPS.values() if is_covered(option, step.options)} for option in READERS}
    assert covered == READERS


@pytest.mark.parametrize(
    ("step", "lacks"),
    [
        (rollout, "rollout.n_samples_per_prompt"),  # read by a helper
        (rollout, "rollout.rollout_top_p"),  # by a property of the section, of the run
        (filter_groups, "rollout.max_refill_rounds"),
        (advantage, "algorithm.advantage_estimator"),
        (advantage, "algorithm.rewards_normalization"),  # by the estimator
    ],
)
def test_an_iteration_ends_where_a_step_reads_what_it_did_not_declare(
    step: DurableStep[Any], lacks: str, tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lacks in step.reads
    less = replace(step, reads=tuple(option for option in step.reads if option != lacks))
    monkeypatch.setattr(f"cairn.flows.iteration.{step.body.__name__}", less)
    place = f"`reads` of {step.body.__name__} in {step.body.__module__}"
    with (
        tiny_context(str(tmp_path), tiny_config(tiny_assets)) as (run, _),
        pytest.raises(UndeclaredRead, match=re.escape(f"step {step.name} reads {lacks} ") + ".*" + re.escape(place)),
    ):
        iteration(run, DirectSteps(run), 0)
    assert not run.ledger.find(0, step.name, {Step.ROLLOUT: "00-000", Step.FILTER: "00"}.get(step.name))


@pytest.mark.parametrize(("engine", "lacks"), [("rollout", "rollout.dtype"), ("training", "algorithm.eps_clip")])
def test_an_engine_reads_what_its_digest_covers(
    engine: str, lacks: str, tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, engine, tuple(option for option in ENGINES[engine] if option != lacks))
    with (
        pytest.raises(UndeclaredRead, match=re.escape(f"the {engine} engine reads {lacks} ")),
        tiny_context(str(tmp_path), tiny_config(tiny_assets)) as (run, _),
    ):
        iteration(run, DirectSteps(run), 0)


def test_the_digest_of_what_an_engine_is_made_from_is_an_input_of_whoever_calls_it(
    tiny_assets: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_assets, checkpoint={"save_interval": 1})
    with tiny_context(str(tmp_path), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        made = {commit.step: commit.inputs for commit in run.ledger.commits(0)}
    rollouts, training = (digest(config, ENGINES[name]) for name in ("rollout", "training"))
    assert made[Step.ROLLOUT]["engine.rollout"] == rollouts
    assert all(made[step]["engine.training"] == training for step in (Step.TRAIN, Step.CHECKPOINT, Step.SYNC))
    assert not [name for name in made[Step.ADVANTAGE] if name.startswith("engine.")]
