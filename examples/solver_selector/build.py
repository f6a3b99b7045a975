"""A model that answers with mistakes, and picks at random: `python -m examples.solver_selector.build`.

The demonstrations are the questions and answers of the quarter turns (`examples/quarter_turns`). Between them are
choices among three such answers, with a random pick: only the reward says which pick is right.

    build/solver_selector/
        demonstrations.jsonl   of the warm start
        untrained/             the model before its warm start, and its tokenizer
        runs/warm-start/       the ledger of the warm start
        model/                 the warm-started model
"""

import random
from pathlib import Path

from examples.building import begin, build_by_command
from examples.quarter_turns.build import STEPS, demonstrations, swapped
from examples.solver_selector.agents import SOLVERS, choice

FOLDER = Path("build/solver_selector")


def main() -> None:
    """Command line."""
    build_by_command("the model of solver and selector", FOLDER, build)


def build(folder: Path, seed: int) -> None:
    """Write the folder."""
    from examples.quickstart.warm_start import BATCH, warm_start, write_model

    begin(folder, shown(seed, BATCH * STEPS), seed)
    warm_start(folder, STEPS)
    write_model(folder)


def shown(seed: int, count: int) -> list[dict[str, str]]:
    """So many demonstrations: an answer, a choice, and so on."""
    rng, found = random.Random(f"choices/{seed}"), list[dict[str, str]]()
    for row in demonstrations(seed, 2 * count):
        answers = [swapped(row["response"], rng) for _ in range(SOLVERS - 1)] + [row["response"]]
        rng.shuffle(answers)
        found += [row, {"prompt": choice(row["prompt"], answers), "response": str(rng.randint(1, SOLVERS))}]
        if len(found) >= count:
            break
    return found[:count]


if __name__ == "__main__":
    main()
