"""Every durable step, by its name."""

from typing import Any

from cairn.configs.schema.run import RunConfig
from cairn.storage.commits import Step
from cairn.storage.terms import Rules
from cairn.tasks.advantage import advantage
from cairn.tasks.checkpoint import checkpoint
from cairn.tasks.evaluate import evaluate
from cairn.tasks.filter import filter_groups
from cairn.tasks.given import read_demonstrations, take_all
from cairn.tasks.reward import reward
from cairn.tasks.rollout import rollout
from cairn.tasks.score import score
from cairn.tasks.step import DurableStep
from cairn.tasks.streaming.admit import admit
from cairn.tasks.streaming.take import take_groups
from cairn.tasks.sync import sync
from cairn.tasks.train import train

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
