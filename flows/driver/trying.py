"""A trial of a recipe: a few prompts are answered and graded by the run's own steps, before anything trains.

The ledger is in a temporary folder. Of the engines only those of the rollout start, and a reward model.
"""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pyarrow as pa

from cairn.configs.errors import ConfigError
from cairn.configs.schema.run import RunConfig
from cairn.flows.driver.session import fleet_name
from cairn.flows.driver.sources import Sources, open_graders
from cairn.flows.events import Event
from cairn.flows.iteration import plan_round
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.storage.records import Record
from cairn.tasks.generation.rollout import rollout
from cairn.tasks.grading.reward import reward
from cairn.tasks.steps import rules


class Tried(Record):
    """A sample of a trial."""

    prompt: str
    response: str
    label: str | None
    metadata: str | None
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1 for each token of the response that would be trained on."""
    finish_reason: str
    status: str
    reward: float | None
    components: str | None
    """Other results of the grader, as JSON."""
    grader: str
    error: str | None


def one_engine(config: RunConfig, prompts: int) -> RunConfig:
    """Return the configuration of a trial: one iteration of a few prompts on one engine, without a lag.

    A prompt gets one sample, or its whole group where the grader sees groups. Raises ConfigError where a run samples
    nothing.
    """
    if not config.samples_responses:
        raise ConfigError(
            [f"a run that learns from {config.algorithm.learns_from} samples nothing: `cairn validate` checks it"]
        )
    changes: dict[str, Any] = {
        "num_rollout": 1,
        "num_epoch": None,
        "rollout_batch_size": prompts,
        "over_sampling_batch_size": None,
        "partial_rollout": False,
        "pipeline": "sync",
        "lag": None,
        "max_age": None,
        "num_engines": 1,
        "min_num_engines": None,
        "shards_per_round": None,
        "server_groups": (),
        "external_urls": config.rollout.external_urls[:1],
        "router": None,
        "num_episode_workers": 1,
    }
    if not config.reward.group_rm:
        changes["n_samples_per_prompt"] = 1
    evaluation = config.eval.model_copy(update={"eval_interval": None, "benchmarks": ()})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=changes), "eval": evaluation})


def tried(
    config: RunConfig,
    prompts: int,
    emit: Callable[[Event], None] = lambda event: None,
    note: Callable[[str], None] = lambda sentence: None,
) -> list[Tried]:
    """Return the samples of a trial of the first prompts that a run would draw, by group.

    Raises the errors of a run that opens: ConfigError, BadModel, BadData, BadPlugin and EngineError.
    """
    from cairn.engines.fleet.fleet import Fleet  # Ray takes a second to import

    config = one_engine(config, prompts)
    sources = Sources.open(config, note=note)
    with tempfile.TemporaryDirectory(prefix="cairn-try-") as folder, ExitStack() as stack:
        store = open_store(folder)
        ledger = Ledger.create(store, "try", config, sources.digests, rules=rules(config))
        stack.callback(ledger.acquire().release, Outcome.STOPPED)
        name = f"{fleet_name(store, 'try')}-{uuid4().hex[:8]}"
        fleet = stack.enter_context(
            Fleet.start(config, name=name, total_steps=1, model_digests=sources.digests, samples_only=True)
        )
        graders = open_graders(config, stack, None, lambda: fleet.scorer)
        run = sources.context(config, ledger, lambda: fleet, graders, emit)
        rows: list[Tried] = []
        for shard, part in plan_round(run, 0, None, None, 0):
            generated = rollout(run, 0, shard, None, [], [], **part)
            graded = reward(run, 0, shard, generated)
            rows += _rows(run.read(generated), run.read(graded))
        return rows


def _rows(samples: pa.Table, rewards: pa.Table) -> list[Tried]:
    grades = {(row["group_id"], row["sample_index"]): row for row in rewards.to_pylist()}
    return [_row(row, grades[row["group_id"], row["sample_index"]]) for row in samples.to_pylist()]


def _row(sample: dict[str, Any], grade: dict[str, Any]) -> Tried:
    names = ("label", "metadata", "finish_reason", "prompt_ids", "response_ids", "loss_mask")
    return Tried.model_validate(
        {
            **{name: sample[name] for name in names},
            "prompt": sample["prompt_text"],
            "response": sample["response_text"],
            **{name: grade[name] for name in ("status", "reward", "components", "grader")},
            "error": sample["error"] or grade["error"],
        }
    )
