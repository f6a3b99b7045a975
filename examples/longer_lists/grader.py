"""The reward: half for the share of digits in their right places, half for an entirely right answer."""

import re

import cairn


def grade(sample: cairn.Sample) -> dict[str, float]:
    """Return the reward of a response that is the box alone. Evaluations count `exact`."""
    found = re.fullmatch(r"\\boxed\{([\d ]*)\}", sample.response.strip())
    answer, wanted = found[1].split() if found else [], str(sample.label).split()
    right = sum(a == b for a, b in zip(answer, wanted, strict=False)) / max(len(wanted), len(answer))
    exact = float(answer == wanted)
    return {"reward": (right + exact) / 2, "exact": exact}
