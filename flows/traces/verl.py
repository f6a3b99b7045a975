"""verl's rollouts: `<step>.jsonl` in `trainer.rollout_data_dir`, or in `trainer.validation_data_dir`.

A line is a sample with `input`, `output`, `gts` (the expected answer), `score`, `step`, and the values that the reward
function returned besides. Samples of one prompt need not follow each other: verl sorts a batch by length.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cairn.flows.traces.recorded import Format, Reading, Recorded, number, spelled, text, whole

_OWN = ("input", "output", "gts", "score", "step")


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.glob("*.jsonl") if _step(file) is not None]


def _step(file: Path) -> int | None:
    return int(file.stem) if file.stem.isascii() and file.stem.isdecimal() and len(file.stem) < 10 else None


def _read(line: Mapping[str, Any], reading: Reading) -> list[Recorded]:
    prompt = text(line.get("input"), "input")
    others = {name: value for name, value in line.items() if name not in _OWN}
    numbers = {name: number(value, name) for name, value in others.items() if isinstance(value, int | float)}
    return [
        Recorded(
            group=prompt,
            prompt=prompt,
            response=text(line.get("output"), "output"),
            reward=number(line.get("score"), "score"),
            grader="verl",
            step=whole(line.get("step"), "step"),
            components={name: value for name, value in numbers.items() if value is not None} or None,
            label=spelled(line.get("gts")),
            metadata=others,
        )
    ]


VERL = Format("verl", "<step>.jsonl, by trainer.rollout_data_dir", _files, _read, True, _step)
