r"""Sorting of eight digits, after demonstrations of four: `python -m examples.longer_lists.build`.

The warm start shows right answers for lists of two to four digits, and lists of up to ten to repeat unchanged. So the
model knows the form of long answers and how to sort short lists, and has seen no answer to a longer one. The prompts
with longer lists are in the file in the order of a curriculum: five digits first, then six, seven and eight, always
mixed with others. Held-out prompts have eight digits, and a hash keeps them out of training.

    build/longer_lists/
        demonstrations.jsonl   of the warm start
        train.jsonl            prompts and labels, 32 an iteration, in their order
        heldout.jsonl          lists of eight digits
        model/                 the warm-started model
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from examples.building import begin, build_by_command, write_rows
from examples.quickstart.task import is_held_out, label

FOLDER = Path("build/longer_lists")
SHOWN, COPIED, LONGEST = 4, 10, 8
STEPS = 400
"""Optimizer steps of the warm start."""

PROMPTS = 32
"""Prompts of an iteration."""

CURRICULUM = {5: 40, 6: 50, 7: 60, 8: 450}
"""Iterations in which lists of so many digits are the longest usual ones."""

HELD_OUT_ROWS = 256


def main() -> None:
    """Command line."""
    build_by_command("the model and the data of the longer lists", FOLDER, build)


def build(folder: Path, seed: int, steps: int = STEPS) -> None:
    """Write the folder; `steps` is a multiple of ten."""
    from examples.quickstart.warm_start import BATCH, warm_start, write_model

    shown = itertools.islice(demonstrations(random.Random(f"demonstrations/{seed}")), BATCH * steps)
    begin(folder, list(shown), seed)
    write_rows(folder / "train.jsonl", curriculum(random.Random(f"curriculum/{seed}")))
    held_out = random.Random(f"held out/{seed}")
    write_rows(folder / "heldout.jsonl", (problem(held_out, LONGEST, held_out=True) for _ in range(HELD_OUT_ROWS)))
    warm_start(folder, steps)
    write_model(folder)


def demonstrations(rng: random.Random) -> Iterator[dict[str, str]]:
    """Lists to repeat, two in five, and short ones that are sorted; all of them right."""
    while True:
        if rng.random() < 0.4:
            digits = label([rng.randrange(10) for _ in range(rng.randint(2, COPIED))])
            yield {"prompt": f"Repeat the digits {digits} in the same order.", "response": f"\\boxed{{{digits}}}"}
        else:
            row = problem(rng, rng.randint(2, SHOWN), held_out=False)
            yield {"prompt": row["prompt"], "response": f"\\boxed{{{row['label']}}}"}


def curriculum(rng: random.Random) -> Iterator[dict[str, str]]:
    """Half of the prompts of the length whose turn it is, the others from three digits to one more than that."""
    for length, iterations in CURRICULUM.items():
        for _ in range(iterations * PROMPTS):
            other = rng.randint(3, min(length + 1, LONGEST))
            yield problem(rng, rng.choice((length, other)), held_out=False)


def problem(rng: random.Random, length: int, *, held_out: bool) -> dict[str, str]:
    """A list to sort, of one of the two sets."""
    while True:
        digits = [rng.randrange(10) for _ in range(length)]
        prompt = f"Sort the digits {label(digits)} in increasing order."
        if is_held_out(prompt) == held_out:
            return {"prompt": prompt, "label": label(sorted(digits))}


if __name__ == "__main__":
    main()
