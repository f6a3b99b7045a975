"""Every option that changes what a step makes is among what the step says it reads."""

import pytest

from cairn.configs.options import LIST_ITEM, options
from cairn.configs.schema.run import RunConfig
from cairn.storage.commits import Step
from cairn.tasks.steps import STEPS

UNREAD = {
    "model.": "the inputs carry the digests of the folders themselves",
    "checkpoint.": "what is kept, not what it is",
    "fleet.": "where engines lie and how weights travel; what arrives is verified",
    "retry.": "how often is tried what gives the same in the end",
    "operations.": "how a driver runs and ends",
    "recovery.": "what a driver does about bits that differ",
    "tracking.": "what is told to people",
    "reward.num_workers": "graders do not see each other",
    "eval.eval_interval": "which iterations have the step",
    "eval.skip_eval_before_train": "which iterations have the step",
    "rollout.router": "which server a request goes to",
    "rollout.num_gpus_per_node": "where an engine lies",
    "rollout.max_running_requests": "company in a batch: each commit says whether the engine is invariant to it",
    "rollout.sglang_server_concurrency": "company in a batch",
    "rollout.over_sampling_batch_size": "an argument of the step: how many groups a shard has",
    "rollout.shards_per_round": "an argument of the step: how groups are cut into shards",
    "rollout.timeout": "how long is waited",
    "rollout.rollout_health_check_interval": "how long is waited",
    "rollout.rollout_health_check_timeout": "how long is waited",
    "rollout.rollout_health_check_first_wait": "how long is waited",
    "training.timeout": "how long is waited",
}
"""Options, or beginnings of their names, that no step reads, and why their steps make the same all the same."""


def covered(option: str, reads: tuple[str, ...]) -> bool:
    return any(f"{option}.".startswith(f"{name}.") for name in reads)


@pytest.mark.parametrize("option", [one.name for one in options(RunConfig)])
def test_an_option_is_read_by_a_step_or_known_to_change_nothing(option: str) -> None:
    name = option.partition(f".{LIST_ITEM}")[0]
    read = any(covered(name, step.reads) for step in STEPS.values())
    unread = [beginning for beginning in UNREAD if name == beginning or name.startswith(beginning.rstrip("."))]
    assert read or unread, f"{option} is in the `reads` of no step: add it to those whose results it changes"


@pytest.mark.parametrize(
    ("option", "steps"),
    [
        ("rollout.num_gpus_per_engine", {Step.ROLLOUT, Step.EVAL}),
        ("rollout.external_urls", {Step.ROLLOUT, Step.EVAL, Step.SYNC}),
        ("rollout.server_groups", {Step.ROLLOUT, Step.EVAL, Step.SYNC}),
        ("training.num_gpus_per_rank", {Step.SCORE, Step.TRAIN}),
        ("training.lora.lora_alpha", {Step.SCORE, Step.TRAIN}),
        ("rollout.rollout_temperature", {Step.ROLLOUT, Step.SCORE, Step.TRAIN}),
    ],
)
def test_what_an_engine_computes_on_is_read_by_all_that_compute_on_it(option: str, steps: set[Step]) -> None:
    assert {step.name for step in STEPS.values() if covered(option, step.reads)} == steps
