"""Every durable step, by its name."""

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
GIVEN: dict[Step, DurableStep[Any]] = {step.name: step for step in (read_demonstrations, take_all)}
"""Those in their places where the data hold what is trained on."""

STREAMED: dict[Step, DurableStep[Any]] = {step.name: step for step in (admit, take_groups)}
"""Those before them, and in their places, where samples are generated all the time."""


def steps_of(config: RunConfig) -> dict[Step, DurableStep[Any]]:
    """The steps of a run."""
    if config.rollout.pipeline == "streaming":
        return STEPS | STREAMED
    return STEPS if config.samples_responses else STEPS | GIVEN


def rules(config: RunConfig) -> dict[str, Rules]:
    """What each reads under a configuration."""
    return {str(name): step.rules(config) for name, step in steps_of(config).items()}


# Which committed steps no longer match, if a run's configuration, data, models or user code were others.
#
# A step is stale itself if what it reads has another digest, and with it every step that was made from its commit.


StaleStep = tuple[int, str, str | None, str]
"""(iteration, step, shard, why) of a commit."""


def stale_steps(ledger: Ledger, config: RunConfig, inputs: Mapping[str, str]) -> list[StaleStep]:
    """All commits of a run's own that would not be made from `config` and `inputs` as they were made, in the order of
    the ledger. `inputs`: digests by the names of the manifest's; those left out count as unchanged. Reads every commit.
    """
    terms = ledger.terms
    given = {name: inputs.get(name, digest) for name, digest in terms.inputs.items()}
    recorded = from_manifest(terms.config)
    reasons = {name: _changed(step, recorded, config, terms.inputs, given) for name, step in steps_of(recorded).items()}
    if not any(reasons.values()):
        return []
    found: dict[str, StaleStep] = {}
    for iteration in ledger.iterations():
        if iteration < ledger.first_iteration:
            continue
        for commit in causal_order(ledger.commits(iteration)):
            why = reasons[commit.step] or [i for i in commit.inputs if i in found]
            if why:
                found[commit.name] = (iteration, str(commit.step), commit.shard, ", ".join(why))
    return list(found.values())


def _changed(
    step: DurableStep[Any], recorded: RunConfig, given: RunConfig, inputs: Mapping[str, str], others: Mapping[str, str]
) -> list[str]:
    """Names of what a step reads and what differs."""
    options = [name for name, _, _ in differences(recorded.model_dump(mode="json"), given.model_dump(mode="json"))]
    reads = reads_under(given, step.options)
    fields = [option for option in options if is_covered(option, reads)]
    read = [*step.externals, *step.plugins, *(f"{option}:modules" for option in step.plugins)]
    differing = [name.partition(":")[0] for name in read if inputs.get(name) != others.get(name)]
    return fields + list(dict.fromkeys(differing))
