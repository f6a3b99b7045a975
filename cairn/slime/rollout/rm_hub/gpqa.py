"""Multiple choice."""

from typing import Any

from cairn.tasks.rewards import gpqa
from cairn.tasks.rewards.sample import Sample


def compute_gpqa_reward(response: str, label: object, metadata: dict[str, Any] | None = None) -> float:
    """Return 1 where a response names the right choice, else 0."""
    return float(gpqa.grade(Sample(response, str(label), metadata or {}))["reward"])
