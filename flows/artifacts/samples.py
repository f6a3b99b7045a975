"""The best, the median and the worst sample that an iteration generated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from cairn.storage.commits import Commit, Step

Read = Callable[[Commit, Sequence[str]], pa.Table]
"""Columns of the table of a commit."""

_TEXT = ["group_id", "sample_index", "prompt_text", "response_text", "label", "finish_reason"]


@dataclass(frozen=True)
class Picked:
    """One sample."""

    title: str
    group_id: int
    sample_index: int
    reward: float
    prompt: str
    response: str
    label: str | None
    finish_reason: str


def picked_samples(commits: Sequence[Commit], read: Read) -> list[Picked]:
    """Best, median and worst by reward of an iteration's own samples, each once; none where none was graded. Of equal
    rewards the earlier group's. Reads the rewards of all samples, and the texts of three."""
    rollouts = {commit.shard: commit for commit in commits if commit.step is Step.ROLLOUT}
    graded = [commit for commit in commits if commit.step is Step.REWARD and commit.shard in rollouts]
    columns = ["group_id", "sample_index", "reward"]
    rows = []
    for commit in graded:
        table = read(commit, columns).drop_null()
        groups, indices, rewards = (table.column(name).to_pylist() for name in columns)
        rows += [
            (-reward, group, index, commit.shard) for reward, group, index in zip(rewards, groups, indices, strict=True)
        ]
    rows.sort(key=lambda row: row[:3])
    places = {"Best": 0, "Median": len(rows) // 2, "Worst": len(rows) - 1} if rows else {}
    found, seen = [], set()
    for title, place in places.items():
        negative, group, index, shard = rows[place]
        if place in seen:
            continue
        seen.add(place)
        table = read(rollouts[shard], _TEXT)
        ours = pc.and_(pc.equal(table.column("group_id"), group), pc.equal(table.column("sample_index"), index))
        (row,) = table.filter(ours).to_pylist()
        found.append(
            Picked(
                title=title,
                group_id=group,
                sample_index=index,
                reward=-negative,
                prompt=row["prompt_text"],
                response=row["response_text"],
                label=row["label"],
                finish_reason=row["finish_reason"],
            )
        )
    return found
