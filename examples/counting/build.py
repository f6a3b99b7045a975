r"""Counting down, then sorting: `python -m examples.counting.build`.

    Count down from 5, then sort 3 8 1.   ->   \boxed{5 4 3 2 1: 1 3 8}

The first number is drawn log-normally: half of the answers count four numbers or less, one in a hundred more than 60.
The model ends its answers itself, so their lengths are long-tailed without being forced. Demonstrations count
correctly, and most of them swap two of the digits. The model has to learn from its rewards to swap nothing, after a
count of any length. A hash of the prompt decides which prompts are held out.

    build/counting/
        demonstrations.jsonl   of the warm start
        train.jsonl            prompts and labels
        heldout.jsonl          others: no prompt is in both
        model/                 the warm-started model
"""

import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path

from examples.building import begin, build_by_command, write_rows
from examples.quickstart.task import is_held_out, label

FOLDER = Path("build/counting")
MEDIAN, SIGMA = 4, 1.2
"""Distribution of the numbers that an answer counts: log-normal, …"""

MOST = 99
"""… and no more."""

DIGITS = 3
"""To sort: all different."""

WRONG_DEMONSTRATIONS = 0.7
"""Share of the demonstrations with two neighbours swapped."""

STEPS = 300
"""Optimizer steps of the warm start."""

TRAIN_ROWS = 16_384
HELD_OUT_ROWS = 256


def main() -> None:
    """Command line."""
    build_by_command("the model and the data of the counting", FOLDER, build)


def build(folder: Path, seed: int, steps: int = STEPS) -> None:
    """Write the folder; `steps`, of the warm start, is a multiple of ten."""
    from examples.quickstart.warm_start import BATCH, warm_start, write_model

    shown = itertools.islice(demonstrations(random.Random(f"demonstrations/{seed}")), BATCH * steps)
    begin(folder, list(shown), seed)
    write_rows(folder / "train.jsonl", itertools.islice(problems(seed, held_out=False), TRAIN_ROWS))
    write_rows(folder / "heldout.jsonl", itertools.islice(problems(seed, held_out=True), HELD_OUT_ROWS))
    warm_start(folder, steps, ["training.max_tokens_per_gpu=4096"])  # samples of a length together: little is padding
    write_model(folder)


def problems(seed: int, *, held_out: bool) -> Iterator[dict[str, str]]:
    """Endless prompts of one of the two sets, with their labels."""
    rng = random.Random(f"problems/{seed}/{held_out}")
    while True:
        prompt, count, digits = _drawn(rng)
        if is_held_out(prompt) == held_out:
            yield {"prompt": prompt, "label": _answer(count, sorted(digits))}


def demonstrations(rng: random.Random) -> Iterator[dict[str, str]]:
    """Answers to imitate, to prompts that are not held out; most have two digits in the wrong order."""
    while True:
        prompt, count, digits = _drawn(rng)
        if is_held_out(prompt):
            continue
        digits.sort()
        if rng.random() < WRONG_DEMONSTRATIONS:
            i = rng.randrange(DIGITS - 1)
            digits[i], digits[i + 1] = digits[i + 1], digits[i]
        yield {"prompt": prompt, "response": f"\\boxed{{{_answer(count, digits)}}}"}


def _drawn(rng: random.Random) -> tuple[str, int, list[int]]:
    count = min(MOST, max(1, round(rng.lognormvariate(math.log(MEDIAN), SIGMA))))
    digits = rng.sample(range(10), DIGITS)
    return f"Count down from {count}, then sort {label(digits)}.", count, digits


def _answer(count: int, digits: list[int]) -> str:
    return f"{label(list(range(count, 0, -1)))}: {label(digits)}"


if __name__ == "__main__":
    main()
