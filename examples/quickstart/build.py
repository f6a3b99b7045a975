"""Build the quickstart's model and data: `python -m examples.quickstart.build`.

    build/quickstart/
        train.jsonl            prompts and labels to learn from
        heldout.jsonl          others, to measure by: no prompt stands in both
        demonstrations.jsonl   prompts and responses of the warm start, most of them a little wrong
        model/                 the warm-started model and its tokenizer, in Hugging Face format
        built.json             what it was built from

The folder appears at once and whole. It is built again when this package or a library that matters has changed.
"""

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import random
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from examples.quickstart.task import demonstration, label, problems

FOLDER = Path("build/quickstart")
TRAIN_ROWS = 4096
HELD_OUT_ROWS = 256
WRONG_DEMONSTRATIONS = 0.75
"""Share of the demonstrations with one wrong swap."""

STEPS = 300
"""Optimizer steps of the warm start."""

STAMP = "built.json"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Build the quickstart's model and data set.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the data and the initial weights (default: 0)")
    arguments = parser.parse_args()
    built = build(arguments.folder, arguments.seed)
    print(f"{arguments.folder} {'is built' if built else 'is up to date'}")


def build(folder: Path, seed: int = 0, steps: int = STEPS) -> bool:
    """Bring the folder up to date. Returns whether there was anything to do.

    `steps`, of the warm start, is a multiple of ten.
    """
    stamp = _stamp(seed, steps)
    if _read_stamp(folder) == stamp:
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        fresh = Path(work) / "fresh"
        fresh.mkdir()
        _build(fresh, Path(work) / "untrained", seed, steps)
        (fresh / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
        if folder.exists():
            shutil.move(folder, Path(work) / "old")
        fresh.rename(folder)
    return True


def _build(folder: Path, untrained: Path, seed: int, steps: int) -> None:
    # Imported here because they take seconds, and a build that is up to date needs none of them.
    from transformers.utils import logging

    from examples.quickstart.model import build_model, build_tokenizer
    from examples.quickstart.warm_start import BATCH, warm_start

    logging.disable_progress_bar()
    train = problems(seed, held_out=False)
    rng = random.Random(f"demonstrations/{seed}")
    demonstrations = [
        {"prompt": prompt, "response": demonstration(digits, rng, WRONG_DEMONSTRATIONS)}
        for prompt, digits in itertools.islice(train, BATCH * steps)
    ]
    _write(folder / "demonstrations.jsonl", demonstrations)
    _write(folder / "train.jsonl", _unlike(train, TRAIN_ROWS))
    _write(folder / "heldout.jsonl", _unlike(problems(seed, held_out=True), HELD_OUT_ROWS))

    tokenizer = build_tokenizer(text for row in demonstrations for text in ("user\nassistant\n", *row.values()))
    build_model(tokenizer, seed).save_pretrained(untrained)
    examples = [
        (
            tokenizer.encode(_chat_prompt(tokenizer, row["prompt"]), add_special_tokens=False),
            [*tokenizer.encode(row["response"], add_special_tokens=False), tokenizer.eos_token_id],
        )
        for row in demonstrations
    ]
    with Progress(*Progress.get_default_columns(), "{task.fields[loss]}", console=Console(stderr=True)) as progress:
        task = progress.add_task("Warm start of the tiny model", total=steps, loss="")
        warm_start(
            untrained,
            folder / "model",
            examples,
            lambda step, loss: progress.update(task, completed=step, loss=f"loss {loss:.3f}"),
        )
    tokenizer.save_pretrained(folder / "model")


def _chat_prompt(tokenizer: Any, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def _unlike(source: Iterable[tuple[str, list[int]]], count: int) -> list[dict[str, str]]:
    """The first `count` prompts that differ from one another, with their labels."""
    labels: dict[str, str] = {}
    for prompt, digits in source:
        labels[prompt] = label(digits)
        if len(labels) == count:
            break
    return [{"prompt": prompt, "label": answer} for prompt, answer in labels.items()]


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _stamp(seed: int, steps: int) -> dict[str, Any]:
    sources = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (Path(__file__).with_name(name) for name in ("build.py", "model.py", "task.py", "warm_start.py"))
    }
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")}
    return {"seed": seed, "steps": steps, "sources": sources, "versions": versions}


def _read_stamp(folder: Path) -> Any:
    path = folder / STAMP
    return json.loads(path.read_text()) if path.is_file() else None


if __name__ == "__main__":
    main()
