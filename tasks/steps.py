"""Table of all durable steps by name."""

from collections.abc import Mapping
from typing import Any

from cairn.configs.loader import from_manifest
from cairn.configs.schema.run import RunConfig
from cairn.configs.view import is_covered, reads_under
from cairn.storage.ledger.commits import Step, causal_order
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.terms import Rules, differences
from cairn.tasks.advantages.step import advantage
from cairn.tasks.durable.step import DurableStep
from cairn.tasks.evaluation.evaluate import evaluate
from cairn.tasks.generation.offline import read_demonstrations, take_all
from cairn.tasks.generation.rollout import rollout
from cairn.tasks.grading.reward import reward
from cairn.tasks.selecting.filter import filter_groups
from cairn.tasks.streaming.stream import admit
from cairn.tasks.streaming.take import take_groups
from cairn.tasks.trainer.checkpoint import checkpoint
from cairn.tasks.trainer.score import score
from cairn.tasks.trainer.sync import sync
from cairn.tasks.trainer.train import train

STEPS: dict[Step, DurableStep[Any]] = {
    step.name: step for step in (rollout, reward, filter_groups, score, advantage, train, checkpoint, sync, evaluate)
}
OFFLINE_STEPS: dict[Step, DurableStep[Any]] = {step.name: step for step in (read_demonstrations, take_all)}
"""Steps that replace those of `STEPS` if the data contain the responses to train on."""

STREAMING_STEPS: dict[Step, DurableStep[Any]] = {step.name: step for step in (admit, take_groups)}
"""Steps that precede or replace those of `STEPS` if samples are generated continuously."""


def steps_of(config: RunConfig) -> dict[Step, DurableStep[Any]]:
    """Return the steps of a run."""
    if config.rollout.pipeline == "streaming":
        return STEPS | STREAMING_STEPS
    return STEPS if config.samples_responses else STEPS | OFFLINE_STEPS


def rules(config: RunConfig) -> dict[str, Rules]:
    """Return what each step reads under a configuration."""
    return {str(name): step.rules(config) for name, step in steps_of(config).items()}


# Which committed steps become stale under another configuration, data, models or user code.
#
# A step is stale if what it reads has another digest, and so is every step that was made from its commit.


StaleStep = tuple[int, str, str | None, str]
"""(iteration, step, shard, reason) of a stale commit."""


def stale_steps(ledger: Ledger, config: RunConfig, inputs: Mapping[str, str]) -> list[StaleStep]:
    """Return all of a run's own commits that would differ if made from `config` and `inputs`, in the order of the
    ledger.

    Reads every commit. `inputs`: digests by the names of the manifest's; those left out count as unchanged.
    """
    terms = ledger.terms
    new_inputs = {name: inputs.get(name, digest) for name, digest in terms.inputs.items()}
    recorded = from_manifest(terms.config)
    steps = steps_of(recorded).items()
    reasons = {name: _changed(step, recorded, config, terms.inputs, new_inputs) for name, step in steps}
    if not any(reasons.values()):
        return []
    stale: dict[str, StaleStep] = {}
    for iteration in ledger.iterations():
        if iteration < ledger.first_iteration:
            continue
        for commit in causal_order(ledger.commits(iteration)):
            why = reasons[commit.step] or [i for i in commit.inputs if i in stale]
            if why:
                stale[commit.name] = (iteration, str(commit.step), commit.shard, ", ".join(why))
    return list(stale.values())


def _changed(
    step: DurableStep[Any],
    recorded: RunConfig,
    config: RunConfig,
    inputs: Mapping[str, str],
    new_inputs: Mapping[str, str],
) -> list[str]:
    """Return the names of the inputs of a step that differ."""
    options = [name for name, _, _ in differences(recorded.model_dump(mode="json"), config.model_dump(mode="json"))]
    reads = reads_under(config, step.options)
    fields = [option for option in options if is_covered(option, reads)]
    read = [*step.externals, *step.plugins, *(f"{option}:modules" for option in step.plugins)]
    differing = [name.partition(":")[0] for name in read if inputs.get(name) != new_inputs.get(name)]
    return fields + list(dict.fromkeys(differing))
