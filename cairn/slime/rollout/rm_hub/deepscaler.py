"""DeepScaleR's reward."""

from cairn.tasks.rewards import deepscaler
from cairn.tasks.rewards.sample import Sample


def get_deepscaler_rule_based_reward(response: str, label: object) -> float:
    """Return 1 where the box after the thoughts is mathematically equal to the label, else 0."""
    return deepscaler.grade(Sample(response, str(label)))
