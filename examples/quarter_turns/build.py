"""Turning of small matrices, after demonstrations with mistakes: `python -m examples.quarter_turns.build`.

The questions are those of reasoning-gym's generator `rotate_matrix`. Most demonstrations have one wrong swap of two
neighbours in the turned matrix, so a model that imitates them is right less than half of the time. Held-out questions
are not in the warm start.

    build/quarter_turns/
        demonstrations.jsonl   of the warm start
        untrained/             the model before its warm start, and its tokenizer
        runs/warm-start/       the ledger of the warm start
        model/                 the warm-started model
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from cairn.tasks.data.reasoning_gym import rows
from examples.building import begin, build_by_command

FOLDER = Path("build/quarter_turns")
QUESTIONS = "rotate_matrix?min_n=2&max_n=2&min_rotations=1&max_rotations=1&answer=whole&part=train"
"""As in the recipe, whose seed is so far away that it takes others: question i of seed s is that of seed s + i."""

WRONG_DEMONSTRATIONS = 0.75
"""Share of the demonstrations with one wrong swap."""

STEPS = 150
"""Optimizer steps of the warm start."""


def main() -> None:
    """Command line."""
    build_by_command("the model of the quarter turns", FOLDER, build)


def build(folder: Path, seed: int) -> None:
    """Write the folder."""
    from examples.quickstart.warm_start import BATCH, warm_start, write_model

    begin(folder, shown(seed, BATCH * STEPS), seed)
    warm_start(folder, STEPS)
    write_model(folder)


def shown(seed: int, count: int) -> list[dict[str, str]]:
    """So many demonstrations."""
    return list(itertools.islice(demonstrations(seed, 2 * count), count))


def demonstrations(seed: int, size: int) -> Iterator[dict[str, str]]:
    """Questions, `size` less the held-out ones, each with an answer."""
    rng = random.Random(f"demonstrations/{seed}")
    for row in rows(f"{QUESTIONS}&size={size}&seed={seed}"):
        wrong = rng.random() < WRONG_DEMONSTRATIONS
        yield {"prompt": row["prompt"], "response": swapped(row["label"], rng) if wrong else row["label"]}


def swapped(answer: str, rng: random.Random) -> str:
    """The matrix with two neighbours swapped that differ, within a row or around its end; itself if all are equal."""
    digits = [place for place, character in enumerate(answer) if character.isdigit()]
    pairs = [(a, b) for a, b in itertools.pairwise(digits) if answer[a] != answer[b]]
    characters = list(answer)
    if pairs:
        a, b = rng.choice(pairs)
        characters[a], characters[b] = characters[b], characters[a]
    return "".join(characters)


if __name__ == "__main__":
    main()
