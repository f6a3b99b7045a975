"""Build the quickstart's model and data: `python -m examples.quickstart.build`.

    build/quickstart/
        train.jsonl            prompts and labels to learn from
        heldout.jsonl          others, for evaluation: no prompt is in both
        demonstrations.jsonl   prompts and responses of the warm start, most with a small error
        preferences.jsonl      prompts to learn from, with a right response and one with a wrong swap
        untrained/             the model before its warm start, and its tokenizer
        runs/warm-start/       the ledger of the warm start: `cairn status warm-start --store build/quickstart`
        model/                 the warm-started model and its tokenizer, in Hugging Face format
        built.json             what it was built from

The data and the untrained model appear atomically, and so do the results of the warm start; an interrupted warm start
resumes. Everything is built again when this package or a relevant library has changed.
"""

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from examples.quickstart.task import demonstration, label, problems

FOLDER = Path("build/quickstart")
TRAIN_ROWS = 4096
HELD_OUT_ROWS = 256
WRONG_DEMONSTRATIONS = 0.75
"""Share of the demonstrations with one wrong swap."""

STEPS = 300
"""Optimizer steps of the warm start."""

STAMP = "built.json"
RECIPE = Path(__file__).resolve().parents[2] / "configs" / "recipes" / "quickstart-warm-start.yaml"
"""Recipe of the warm start."""

Train = Callable[[Path, int], None]
"""Trains the model of a folder for so many steps."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Build the quickstart's model and data set.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the data and the initial weights (default: 0)")
    arguments = parser.parse_args()
    built = build(arguments.folder, arguments.seed)
    print(f"{arguments.folder} {'is built' if built else 'is up to date'}")


def build(folder: Path, seed: int = 0, steps: int = STEPS, train: Train | None = None) -> bool:
    """Bring the folder up to date. Returns whether there was anything to do.

    `steps`, of the warm start, is a multiple of ten. `train`: does it, see `warm_start`.
    """
    stamp = _stamp(seed, steps)
    is_begun = _read_stamp(folder) == stamp
    if is_begun and (folder / "model").is_dir():
        return False
    # Imported here because it takes seconds, and a build that is up to date needs none of it.
    from examples.quickstart.warm_start import warm_start, write_model

    if not is_begun:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
            fresh = Path(work) / "fresh"
            fresh.mkdir()
            _begin(fresh, seed, steps)
            (fresh / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
            if folder.exists():
                shutil.move(folder, Path(work) / "old")
            fresh.rename(folder)
    (train or warm_start)(folder, steps)
    write_model(folder)
    return True


def _begin(folder: Path, seed: int, steps: int) -> None:
    """Write the data and the untrained model."""
    from transformers.utils import logging

    from examples.quickstart.model import build_model, build_tokenizer
    from examples.quickstart.warm_start import BATCH

    logging.disable_progress_bar()
    train = problems(seed, held_out=False)
    rng = random.Random(f"demonstrations/{seed}")
    demonstrations = [
        {"prompt": prompt, "response": demonstration(digits, rng, WRONG_DEMONSTRATIONS)}
        for prompt, digits in itertools.islice(train, BATCH * steps)
    ]
    _write(folder / "demonstrations.jsonl", demonstrations)
    _write(folder / "train.jsonl", _unlike(train, TRAIN_ROWS))
    _write(folder / "preferences.jsonl", _pairs(folder / "train.jsonl", random.Random(f"preferences/{seed}")))
    _write(folder / "heldout.jsonl", _unlike(problems(seed, held_out=True), HELD_OUT_ROWS))

    tokenizer = build_tokenizer(text for row in demonstrations for text in ("user\nassistant\n", *row.values()))
    build_model(tokenizer, seed).save_pretrained(folder / "untrained")
    tokenizer.save_pretrained(folder / "untrained")


def _unlike(source: Iterable[tuple[str, list[int]]], count: int) -> list[dict[str, str]]:
    """The first `count` prompts that differ from one another, with their labels."""
    labels: dict[str, str] = {}
    for prompt, digits in source:
        labels[prompt] = label(digits)
        if len(labels) == count:
            break
    return [{"prompt": prompt, "label": answer} for prompt, answer in labels.items()]


def _pairs(train: Path, rng: random.Random) -> Iterator[dict[str, str]]:
    """Yield the right response and a wrong one to every prompt whose digits differ."""
    for row in map(json.loads, train.read_text().splitlines()):
        digits = [int(digit) for digit in row["label"].split()]
        right, wrong = (demonstration(digits, rng, share) for share in (0.0, 1.0))
        if right != wrong:
            yield {"prompt": row["prompt"], "chosen": right, "rejected": wrong}


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _stamp(seed: int, steps: int) -> dict[str, Any]:
    own = [Path(__file__).with_name(name) for name in ("build.py", "model.py", "task.py", "warm_start.py")]
    sources = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in [*own, RECIPE]}
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")}
    return {"seed": seed, "steps": steps, "sources": sources, "versions": versions}


def _read_stamp(folder: Path) -> Any:
    path = folder / STAMP
    return json.loads(path.read_text()) if path.is_file() else None


if __name__ == "__main__":
    main()
