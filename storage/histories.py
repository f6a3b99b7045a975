"""Whether the tokens of committed samples are those of their committed calls: one history, whatever drivers made it."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, repeat
from typing import Any

import numpy as np
import pyarrow.compute as pc

from cairn.storage import canonical, layout
from cairn.storage.commits import Commit, OutputFile, Step
from cairn.storage.findings import Fault, Finding
from cairn.storage.schemas import TRAJECTORIES, TRAJECTORY_PROMPTS
from cairn.storage.snapshots import read_table
from cairn.storage.store import Store

SAMPLES_FILE = "samples.parquet"
_COLUMNS = (
    *("group_id", "sample_index", "prompt_ids", "response_ids", "segments"),
    *(TRAJECTORIES.name, TRAJECTORY_PROMPTS.name),
)


def mixed_histories(store: Store, commit: Commit) -> Iterator[Finding]:
    """The first sample of a rollout of which a segment was not sampled as its calls say, if there is one."""
    files = {output.path.rpartition("/")[2]: output for output in commit.outputs}
    if commit.step is not Step.ROLLOUT or not files.keys() >= {SAMPLES_FILE, layout.CALLS_FILE}:
        return
    calls = _calls(store, commit.run, files[layout.CALLS_FILE])
    samples = read_table(store, commit.run, files[SAMPLES_FILE])
    for row in samples.select([name for name in _COLUMNS if name in samples.column_names]).to_pylist():
        key = row["group_id"], row["sample_index"]
        for call, before in _asked(row):
            recorded = calls.get((*key, call))
            if recorded is None or not _is_after(recorded, before):
                path = layout.in_run(commit.run, files[SAMPLES_FILE].path)
                told = "is not recorded" if recorded is None else f"went on from other tokens than these {len(before)}"
                message = f"{path} has a sample {key[0]}/{key[1]} whose call {call} of the policy {told}"
                yield Finding(fault=Fault.CALLS_DIFFER, path=path, message=message)
                return


def _calls(store: Store, run: str, output: OutputFile) -> dict[tuple[int, int, str], dict[str, Any]]:
    """Return the answered calls of the policy, by (group, sample, call)."""
    table = read_table(store, run, output)
    table = table.filter(pc.field("order").is_valid() & (pc.field("kind") == "sample"))
    rows = table.select(["group_id", "sample_index", "call", "given_tokens", "arguments"]).to_pylist()
    return {(row["group_id"], row["sample_index"], row["call"]): row for row in rows}


def _asked(row: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[int]]]:
    """The calls of a sample's segments, and the tokens before each in its trajectory."""
    lengths = row.get(TRAJECTORIES.name) or [len(row["response_ids"])]
    prompts = row.get(TRAJECTORY_PROMPTS.name) or repeat(None)
    begins = dict(zip((0, *accumulate(lengths)), prompts, strict=False))
    prompt, start, place = row["prompt_ids"], 0, 0
    for segment in row["segments"] or ():
        if place in begins:
            prompt, start = begins[place] or row["prompt_ids"], place
        if segment["call"] is not None:
            yield segment["call"], [*prompt, *row["response_ids"][start:place]]
        place += segment["tokens"]


def _is_after(recorded: Mapping[str, Any], before: Sequence[int]) -> bool:
    """Earlier versions of the code recorded how many tokens these were, and not which."""
    if recorded["arguments"] is None:
        return bool(recorded["given_tokens"] == len(before))
    sha256 = hashlib.sha256(np.asarray(before, np.int32).tobytes())
    return bool(recorded["arguments"] == canonical.to_json({"sha256": sha256.hexdigest()}))
