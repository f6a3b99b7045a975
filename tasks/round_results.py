"""What a filter step says of the groups that its own round judged, with their prompts."""

from typing import TYPE_CHECKING

from cairn.storage.canonical import from_json
from cairn.storage.commits import Commit, Step
from cairn.storage.schemas import Disposition
from cairn.tasks.data.results import GroupResult
from cairn.tasks.rewards import share_of_right
from cairn.tasks.selection import last_selection

if TYPE_CHECKING:
    from cairn.tasks.context import RunContext


def untold_results(run: "RunContext", selection: Commit) -> tuple[GroupResult, ...]:
    """What became of the prompts that were judged since prompts were drawn last: by a round and, where that generated
    nothing since the batch was filled from the buffer, by those before it."""
    found = round_results(run, selection)
    while run.find(selection.iteration, Step.ROLLOUT, f"{selection.shard}-000") is None and selection.iteration:
        selection = last_selection(run, selection.iteration - 1)
        found = round_results(run, selection) + found
    return found


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
        graders = run.read(run.committed(selection.iteration, Step.REWARD, shard), ["grader"]).column("grader")
        for prompt, grader in zip(columns, graders.to_pylist(), strict=True):
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
                    None if row["mean_reward"] is None else share_of_right(row["mean_reward"], grader),
                )
    return tuple(found[group_id] for group_id in sorted(found))
