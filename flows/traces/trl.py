"""TRL's completions: `<output_dir>/completions/completions_<step>.parquet`, written with `log_completions=True`.

A row has `step`, `prompt` and `completion` (texts or chats), a column for each reward function, columns that these log
with `log_extra`, and `advantage`. The file has no total reward: TRL sums the rewards with `reward_weights`, which it
does not record.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from cairn.flows.traces.recorded import Format, Reading, Recorded, Unreadable, messages, number, spelled, whole
from cairn.storage.ledger.snapshots import from_parquet

_NAME = re.compile(r"completions_(\d+)\.parquet")
_LABELS = ("label", "answer", "solution", "ground_truth")
"""Names of logged columns that hold the expected answer; the first that exists counts."""
_EQUAL = 1e-6


def _files(folder: Path) -> list[Path]:
    found = [*folder.glob("completions_*.parquet"), *folder.glob("completions/completions_*.parquet")]
    return [file for file in found if _NAME.fullmatch(file.name)]


def _step(file: Path) -> int | None:
    match = _NAME.fullmatch(file.name)
    return int(match[1]) if match else None


def _read(data: bytes, reading: Reading) -> list[Recorded]:
    table = from_parquet(data)
    missing = [name for name in ("prompt", "completion") if name not in table.column_names]
    if missing:
        raise Unreadable(f"it has no column {missing[0]}: its columns are {', '.join(table.column_names)}")
    weights = _weights(table, reading)
    label = next((name for name in _LABELS if name in table.column_names and name not in weights), None)
    own = {"step", "prompt", "completion", "advantage", label, *weights}
    rows = table.to_pylist()
    samples = [_sample(row, weights, label, own) for row in rows]
    if _contradicts(samples):
        reading.note(
            f"the recorded advantages do not follow from the rewards {' + '.join(weights)}: name the reward columns "
            "with --reward NAME=WEIGHT, as in TRL's reward_weights"
        )
    return samples


def _weights(table: pa.Table, reading: Reading) -> Mapping[str, float]:
    if reading.rewards:
        unknown = [name for name in reading.rewards if name not in table.column_names]
        if unknown:
            raise Unreadable(f"it has no column {unknown[0]}, which --reward names")
        return reading.rewards
    others = {"step", "prompt", "completion", "advantage", *_LABELS}
    columns = [field for field in table.schema if field.name not in others]
    found = {field.name: 1.0 for field in columns if pa.types.is_floating(field.type) or pa.types.is_null(field.type)}
    if not found:
        raise Unreadable("it has no column with rewards")
    return found


def _sample(row: Mapping[str, Any], weights: Mapping[str, float], label: str | None, own: set[str | None]) -> Recorded:
    prompt = messages(row["prompt"], "prompt")
    components = {name: value for name in weights if (value := number(row[name], name)) is not None}
    total = sum(weights[name] * value for name, value in components.items())
    return Recorded(
        group=prompt,
        prompt=prompt,
        response=messages(row["completion"], "completion"),
        reward=total if components else None,
        grader="+".join(weights),
        step=whole(row.get("step"), "step"),
        components=components or None,
        label=None if label is None else spelled(row[label]),
        advantage=number(row.get("advantage"), "advantage"),
        metadata={name: value for name, value in row.items() if name not in own},
    )


def _contradicts(samples: Sequence[Recorded]) -> bool:
    """Whether in some group a higher reward has a lower advantage."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for one in samples:
        if one.reward is not None and one.advantage is not None:
            groups.setdefault(one.group, []).append((one.reward, one.advantage))
    return any(
        reward > other + _EQUAL and advantage < below - _EQUAL
        for group in groups.values()
        for reward, advantage in group
        for other, below in group
    )


TRL = Format("trl", "completions/completions_*.parquet, by log_completions=True", _files, _read, False, _step)
