"""Guessing numbers: `python -m examples.verifiers.build`.

build/verifiers/
    demonstrations.jsonl   of the warm start: single random guesses
    untrained/             the model before its warm start, and its tokenizer
    runs/warm-start/       the ledger of the warm start
    model/                 the model that guesses
    train.jsonl            a row for each task of the environment's taskset
"""

import random
from pathlib import Path

from examples.building import begin, build_by_command, write_rows

FOLDER = Path("build/verifiers")
PROMPT = "Guess my number from 0 to 9."
HINTS = ("Higher.", "Lower.", "That is no number.")
TASKS = 1000
STEPS = 30
"""Optimizer steps of the warm start."""


def main() -> None:
    """Command line."""
    build_by_command("the model that guesses numbers", FOLDER, build)


def build(folder: Path, seed: int) -> None:
    """Write the folder."""
    from examples.quickstart.warm_start import BATCH, warm_start, write_model

    prepare(folder, seed, BATCH * STEPS)
    warm_start(folder, STEPS)
    write_model(folder)


def prepare(folder: Path, seed: int, shown: int) -> None:
    """Write the data and the untrained model, with so many demonstrations."""
    draw = random.Random(seed)
    prompts = (PROMPT, *HINTS)
    begin(folder, [{"prompt": draw.choice(prompts), "response": str(draw.randint(0, 9))} for _ in range(shown)], seed)
    write_rows(folder / "train.jsonl", [{"prompt": PROMPT, "metadata": {"index": index}} for index in range(TASKS)])


if __name__ == "__main__":
    main()
