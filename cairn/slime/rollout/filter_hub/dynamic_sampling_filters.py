"""slime's own filter."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cairn.tasks.selecting.filters.check_reward_nonzero_std import keep
from cairn.tasks.slime import DynamicFilterOutput


def check_reward_nonzero_std(args: Any, samples: Sequence[Any], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ."""
    decision = keep(np.asarray([sample.get_reward_value(args) for sample in samples], np.float64))
    return DynamicFilterOutput(decision.keep, decision.reason)
