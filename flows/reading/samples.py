"""The samples of one iteration as a person wants to see them: prompt, response, reward, advantage and fate."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from cairn.flows.reading.episodes import EpisodeView, episodes
from cairn.storage.commits import Commit, Step, newest_selection
from cairn.storage.ledger import Ledger
from cairn.storage.records import Record
from cairn.storage.schemas import IMAGES, Disposition
from cairn.storage.snapshots import read_recorded_table, read_table

_ROLLOUT = [
    "group_id", "sample_index", "prompt_text", "prompt_ids", "response_text", "response_ids", "label", "finish_reason"
]  # fmt: skip
_REWARD = ["group_id", "sample_index", "reward", "status", "error"]


class ImageView(Record):
    """An image of a prompt."""

    sha256: str
    """Of its bytes, in hex."""
    height: int
    """In pixels, as the model saw it."""
    width: int


class SampleView(Record):
    """One sample with what the later steps made of it; None where they have not come to it."""

    number: int
    """Position among the iteration's samples, from 0."""
    group_id: int
    sample_index: int
    iteration: int
    """In which it was generated: an earlier one if it waited in the buffer."""
    shard: str | None = None
    """Of that iteration's rollout."""
    prompt: str
    response: str
    label: str | None
    reward: float | None
    advantage: float | None
    """Mean over the response's tokens."""
    finish_reason: str
    status: str | None
    disposition: Disposition | None
    reason: str | None
    """Why its group was dropped."""
    error: str | None
    prompt_tokens: int
    response_tokens: int
    images: tuple[ImageView, ...] = ()
    """Of the prompt, in order."""
    episode: EpisodeView | None = None
    """What it went through; None where it is one answer to the prompt, or nobody has asked."""


def iteration_samples(ledger: Ledger, iteration: int) -> list[SampleView]:
    """All samples that the iteration generated or took from the buffer, by group.

    Raises LookupError if the iteration has none, Damaged if a file is not what was committed.
    """
    commits = ledger.commits(iteration)
    rollouts = [commit for commit in commits if commit.step is Step.ROLLOUT]
    selection = newest_selection(commits)
    groups = {} if selection is None else {row["group_id"]: row for row in _read(ledger, selection).to_pylist()}
    if not rollouts and not groups:
        last = ledger.last_iteration()
        there = "it has none yet" if last is None else f"its last iteration is {last}"
        raise LookupError(f"run {ledger.run!r} has no samples of iteration {iteration}; {there}")

    places = {(commit.iteration, commit.shard) for commit in rollouts}
    places |= {(row["iteration"], row["shard"]) for row in groups.values()}
    advantages = next((_advantages(ledger, commit) for commit in commits if commit.step is Step.ADVANTAGE), {})
    found = []
    for origin, shard in sorted(places, key=lambda place: (place[0], place[1] or "")):
        generated = ledger.find(origin, Step.ROLLOUT, shard)
        graded = ledger.find(origin, Step.REWARD, shard)
        assert generated is not None
        rewards = {} if graded is None else _by_sample(_read(ledger, graded, _REWARD))
        sampled = read_recorded_table(ledger.store, generated.run, generated.table, [*_ROLLOUT, IMAGES.name])
        for key, row in _by_sample(sampled).items():
            group = groups.get(row["group_id"], {})
            was_continued = group and (group["iteration"], group["shard"]) != (origin, shard)
            if (origin == iteration or group) and not was_continued:
                found.append((origin, shard, key, row, rewards.get(key, {}), group, advantages.get(key)))
    return [
        SampleView(
            number=number,
            group_id=key[0],
            sample_index=key[1],
            iteration=origin,
            shard=shard,
            prompt=row["prompt_text"],
            response=row["response_text"],
            label=row["label"],
            reward=graded_row.get("reward"),
            advantage=advantage,
            finish_reason=row["finish_reason"],
            status=graded_row.get("status"),
            disposition=group.get("disposition"),
            reason=group.get("reason"),
            error=graded_row.get("error"),
            prompt_tokens=len(row["prompt_ids"]),
            response_tokens=len(row["response_ids"]),
            images=tuple(ImageView(**image) for image in row.get(IMAGES.name) or ()),
        )
        for number, (origin, shard, key, row, graded_row, group, advantage) in enumerate(found)
    ]


def with_episodes(ledger: Ledger, views: Sequence[SampleView]) -> list[SampleView]:
    """The samples, each with what it went through where that was more than one answer. Raises Damaged."""
    found = episodes(ledger, {(one.group_id, one.sample_index): (one.iteration, one.shard) for one in views})
    return [one.model_copy(update={"episode": found.get((one.group_id, one.sample_index))}) for one in views]


def _read(ledger: Ledger, commit: Commit, columns: list[str] | None = None) -> pa.Table:
    return read_table(ledger.store, commit.run, commit.table, columns)


def _by_sample(table: pa.Table) -> dict[tuple[int, int], dict]:
    return {(row["group_id"], row["sample_index"]): row for row in table.to_pylist()}


def _advantages(ledger: Ledger, commit: Commit) -> dict[tuple[int, int], float]:
    table = _read(ledger, commit, ["group_id", "sample_index", "advantages"])
    return {key: float(np.mean(row["advantages"])) for key, row in _by_sample(table).items() if row["advantages"]}
