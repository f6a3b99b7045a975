"""What a filter step says of the groups that its own round judged, with their prompts."""

from typing import TYPE_CHECKING

from cairn.storage.canonical import from_json
from cairn.storage.commits import Commit, Step
from cairn.storage.schemas import Disposition
from cairn.tasks.data.results import GroupResult

if TYPE_CHECKING:
    from cairn.tasks.context import RunContext


def round_results(run: "RunContext", selection: Commit) -> tuple[GroupResult, ...]:
    """By group id. A group is told once: by the filter step of the round that finished it."""
    rows = {
        row["group_id"]: row
        for row in run.read(selection).to_pylist()
        if row["iteration"] == selection.iteration
        and row["shard"].startswith(f"{selection.shard}-")
        and row["disposition"] != Disposition.CONTINUE
    }
    found = {}
    for shard in sorted({row["shard"] for row in rows.values()}):
        rollout = run.committed(selection.iteration, Step.ROLLOUT, shard)
        columns = run.read(rollout, ["group_id", "prompt_index", "label", "metadata"]).to_pylist()
        for prompt in columns:
            row = rows.get(prompt["group_id"])
            if row is not None and row["shard"] == shard and row["group_id"] not in found:
                found[row["group_id"]] = GroupResult(
                    row["group_id"],
                    prompt["prompt_index"],
                    prompt["label"],
                    from_json(prompt["metadata"] or "{}"),
                    row["mean_reward"],
                    row["std_reward"],
                    row["kept"],
                    row["reason"],
                )
    return tuple(found[group_id] for group_id in sorted(found))
