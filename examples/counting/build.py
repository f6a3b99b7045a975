r"""Counting from one number to another: `python -m examples.counting.build`.

    Count from 27 to 31.   ->   \boxed{27 28 29 30 31}

How far is drawn log-normally: half of the answers count four numbers or fewer, one in a hundred more than fifty. The
model ends its answers itself, so that their lengths are long-tailed without being forced. Most demonstrations leave one
number out, and what the model has to learn from its rewards is to leave out none. A hash of the prompt says which are
held out.

    build/counting/
        demonstrations.jsonl   of the warm start
        train.jsonl            prompts and labels
        heldout.jsonl          others: no prompt stands in both
        model/                 the warm-started model
"""

import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path

from examples.building import begin, build_by_command, write_rows
from examples.quickstart.task import is_held_out

FOLDER = Path("build/counting")
LEAST, MOST = 10, 99
"""Numbers that are counted: all of two digits."""

MEDIAN, SIGMA = 4, 1.15
"""Of how many numbers an answer has: log-normal."""

LONGEST = 80
"""Numbers of an answer, which has three tokens for each."""

WRONG_DEMONSTRATIONS = 0.75
"""Share of the demonstrations that leave a number out."""

STEPS = 300
"""Optimizer steps of the warm start."""

TRAIN_ROWS = 4096
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
    warm_start(folder, steps, ["training.max_tokens_per_gpu=2048"])  # samples of a length together: little is padding
    write_model(folder)


def problems(seed: int, *, held_out: bool) -> Iterator[dict[str, str]]:
    """Endless prompts of one of the two sets, with their labels."""
    rng = random.Random(f"problems/{seed}/{held_out}")
    while True:
        prompt, numbers = _drawn(rng)
        if is_held_out(prompt) == held_out:
            yield {"prompt": prompt, "label": _written(numbers)}


def demonstrations(rng: random.Random) -> Iterator[dict[str, str]]:
    """Answers to imitate, to prompts that are not held out; most leave out one number, though never the first."""
    while True:
        prompt, numbers = _drawn(rng)
        if is_held_out(prompt):
            continue
        if rng.random() < WRONG_DEMONSTRATIONS and len(numbers) > 1:
            numbers.pop(rng.randrange(1, len(numbers)))
        yield {"prompt": prompt, "response": f"\\boxed{{{_written(numbers)}}}"}


def _drawn(rng: random.Random) -> tuple[str, list[int]]:
    count = min(LONGEST, max(1, round(rng.lognormvariate(math.log(MEDIAN), SIGMA))))
    first = rng.randint(LEAST, MOST + 1 - count)
    last = first + count - 1
    return f"Count from {first} to {last}.", list(range(first, last + 1))


def _written(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


if __name__ == "__main__":
    main()
