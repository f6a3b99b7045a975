"""Common parts of the builds of warm-started models: a command line, and a folder to begin in."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def build_by_command(what: str, folder: Path, build: Callable[[Path, int], None]) -> None:
    """`build` the folder that the command line names, `folder` by default, from the seed that it says; an example that
    was built stays as it is."""
    parser = argparse.ArgumentParser(description=f"Build {what}.")
    parser.add_argument("--folder", type=Path, default=folder, help="where to (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the data and the initial weights (default: 0)")
    arguments = parser.parse_args()
    folder = arguments.folder
    if (folder / "model").is_dir():
        sys.exit(f"{folder}/model is there already; remove {folder} to build it anew")
    build(folder, arguments.seed)
    print(f"{folder} is built")


def begin(folder: Path, demonstrations: Sequence[dict[str, Any]], seed: int) -> None:
    """Write the demonstrations of the warm start, texts or chats, and a model before it whose tokenizer is made for
    them."""
    from examples.quickstart.model import build_model, build_tokenizer  # imports PyTorch

    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "demonstrations.jsonl", demonstrations)
    tokenizer = build_tokenizer(text for row in demonstrations for text in ("user\nassistant\n", *_texts(row)))
    build_model(tokenizer, seed).save_pretrained(folder / "untrained")
    tokenizer.save_pretrained(folder / "untrained")


def _texts(row: Mapping[str, Any]) -> Iterator[str]:
    for value in row.values():
        if isinstance(value, str):
            yield value
        else:
            yield from (f"{message['role']}\n{message['content']}" for message in value)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
