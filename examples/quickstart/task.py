r"""The task: sort four to six digits.

    Sort the digits 7 3 9 1 4 in increasing order.   ->   \boxed{1 3 4 7 9}

Most demonstrations have one wrong swap, so a model that imitates them is right less than half of the time. It has to
learn from its rewards to swap nothing.
"""

import hashlib
import random
from collections.abc import Iterator

HELD_OUT_SHARE = 1 / 8
"""Share of all prompts. A hash selects them, so that no seed mixes the two sets."""


def problems(seed: int, *, held_out: bool) -> Iterator[tuple[str, list[int]]]:
    """Endless prompts of one of the two sets, each with its sorted digits."""
    rng = random.Random(f"problems/{seed}")
    while True:
        digits = [rng.randrange(10) for _ in range(rng.randint(4, 6))]
        prompt = f"Sort the digits {' '.join(map(str, digits))} in increasing order."
        if is_held_out(prompt) == held_out:
            yield prompt, sorted(digits)


def is_held_out(prompt: str) -> bool:
    """Whether the prompt belongs to the held-out set."""
    return hashlib.sha256(prompt.encode()).digest()[0] < 256 * HELD_OUT_SHARE


def label(digits: list[int]) -> str:
    """The expected answer."""
    return " ".join(map(str, digits))


def demonstration(digits: list[int], rng: random.Random, wrong_share: float) -> str:
    """A response to imitate; `wrong_share` of them have two neighbours swapped that differ."""
    digits = digits.copy()
    places = [i for i in range(len(digits) - 1) if digits[i] != digits[i + 1]]
    if rng.random() < wrong_share and places:
        i = rng.choice(places)
        digits[i], digits[i + 1] = digits[i + 1], digits[i]
    return f"\\boxed{{{label(digits)}}}"
