"""A ragged batch for the algorithms to be compared on: `python tests/parity/batch.py tests/parity/batch.json`.

Groups of uneven sizes, one of which has equal rewards; responses of uneven lengths with tokens of the environment
inside and at their ends. All numbers are multiples of 1/1024, which float32 holds exactly. Needs the standard
library alone.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

GROUPS = [4, 3, 2, 3]
LONGEST = 9


def batch(seed: int = 13) -> dict[str, Any]:
    """The groups' sizes; rewards, one a sample; of each response token its mask and scores."""
    rng = random.Random(seed)

    def near(fields: list[list[float]], spread: float) -> list[list[float]]:
        return [[exact(number + rng.gauss(0, spread)) for number in field] for field in fields]

    lengths = [rng.randint(2, LONGEST) for _ in range(sum(GROUPS))]
    masks = [[1, *(int(rng.random() < 0.75) for _ in range(length - 1))] for length in lengths]
    rewards = [exact(rng.gauss(0, 1)) for _ in lengths]
    rewards[4:7] = [0.5] * 3
    rollout = [[exact(-rng.expovariate(1)) for _ in range(length)] for length in lengths]
    old = near(rollout, 0.3)
    values = near([[0.0] * length for length in lengths], 1.0)
    return {
        "group_sizes": GROUPS,
        "rewards": rewards,
        "loss_masks": masks,
        "rollout_log_probs": rollout,
        "old_log_probs": old,
        "log_probs": near(old, 0.3),
        "ref_log_probs": near(old, 0.6),
        "teacher_log_probs": near(old, 0.6),
        "advantages": near([[0.0] * length for length in lengths], 1.0),
        "sample_advantages": [exact(rng.gauss(0, 1)) for _ in lengths],
        "values": values,
        "new_values": near(values, 0.4),
        "returns": near(values, 1.0),
    }


def exact(number: float) -> float:
    """The nearest multiple of 1/1024."""
    return round(number * 1024) / 1024


if __name__ == "__main__":
    rows = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in batch().items())
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(rows) + "\n}\n")
