"""The table of docs/models.md: a row an architecture, a column a check, each cell a measured value or the reason why
there is none. Tests record cells, each under `build/models`; each record writes the table of all cells."""

import json
import os
import tempfile
from enum import StrEnum
from pathlib import Path

from tests.architectures import ARCHITECTURES

CELLS = Path("build/models")
TABLE = Path("build/models.md")


class Check(StrEnum):
    """A column."""

    CONVERSION = "conversion"
    """Weights to Megatron and back: tensors that are byte for byte the same."""
    LOGITS = "logits"
    """The largest difference of log-probs between Megatron on one rank and transformers, in float32."""
    TENSOR = "TP 2"
    """The same over two tensor-parallel ranks."""
    PIPELINE = "PP 2"
    """The same over two stages."""
    EXPERTS = "EP 2"
    """The same with the experts over two ranks."""
    GRADIENTS = "gradients"
    """The largest difference between a parameter's gradients, relative to its largest, over all layouts."""
    ITERATION = "iteration"
    """A whole iteration by the transformers and torch engines: the largest difference between the log-probs of the
    rollout and those of training."""
    SGLANG = "SGLang"
    """The largest difference between the log-probs of an SGLang server on the CPU and those of transformers."""


def record(architecture: str, check: Check, cell: float | str) -> None:
    """Record a test's result: a measured value, or the reason why there is none."""
    text = cell if isinstance(cell, str) else f"{cell:.1e}"
    _replace(CELLS / architecture / f"{check.name.lower()}.json", json.dumps(text))
    _replace(TABLE, "\n".join(table()) + "\n")


def table() -> list[str]:
    """The lines of the table, an empty cell where nothing is recorded."""
    lines = [
        f"| architecture | models | {' | '.join(Check)} |",
        f"| --- | --- |{' --- |' * len(Check)}",
    ]
    for architecture in ARCHITECTURES:
        cells = [_recorded(architecture.name, check) for check in Check]
        lines.append(f"| `{architecture.name}` | {architecture.models} | {' | '.join(cells)} |")
    return lines


def _recorded(architecture: str, check: Check) -> str:
    try:
        return str(json.loads((CELLS / architecture / f"{check.name.lower()}.json").read_text()))
    except FileNotFoundError:
        return ""


def _replace(path: Path, text: str) -> None:
    """Whole at every moment: tests of other files record at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(name, path)
