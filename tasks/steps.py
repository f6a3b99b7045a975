"""Every durable step, by its name."""

from typing import Any

from storage.commits import Step
from storage.terms import Rules
from tasks.advantage import advantage
from tasks.checkpoint import checkpoint
from tasks.evaluate import evaluate
from tasks.filter import filter_groups
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.score import score
from tasks.step import DurableStep
from tasks.sync import sync
from tasks.train import train

STEPS: dict[Step, DurableStep[Any]] = {
    step.name: step for step in (rollout, reward, filter_groups, score, advantage, train, checkpoint, sync, evaluate)
}

RULES: dict[str, Rules] = {str(name): step.rules for name, step in STEPS.items()}
"""What each reads."""
