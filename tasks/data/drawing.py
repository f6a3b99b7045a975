"""The prompts that come next: of one data set, of several, or of a function; and of a curriculum, before them.

| data | cursor |
|---|---|
| one data set | the position in its stream, a number |
| a mixture | `{"drawn": …, "sources": {name: {"position": …, "owed": …}}}` |
| a source with a state | `{"drawn": …, "state": …}` |
| any of the first two with a curriculum | `{"drawn": …, "data": its cursor, "curriculum": the policy's state}` |

The cursor is committed by every rollout and filter step, and 0 at the beginning of a run. A draw is a pure function of
it and of what became of the prompts of the round before, which a commit holds; so a run that goes on, is forked or
replayed draws what it would have drawn.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from pydantic import JsonValue

from cairn.configs.kinds import CURRICULUM
from cairn.configs.schema.run import RunConfig
from cairn.storage.canonical import from_json
from cairn.tasks.data.errors import BadData, BadPrompt
from cairn.tasks.data.given_prompts import GivenPrompts
from cairn.tasks.data.mixture import MixedData, draw_mixed
from cairn.tasks.data.prompts import PromptData, PromptRow
from cairn.tasks.data.results import GroupResult
from cairn.tasks.data.stream import Draw, DrawnRow, draw, drawn_so_far

Prompts = PromptData | MixedData | GivenPrompts


def learns_from_results(config: RunConfig) -> bool:
    """Whether which prompts come next depends on what became of those before."""
    return config.data.get_samples_path is not None or config.data.curriculum.policy is not None


def next_prompts(
    config: RunConfig,
    data: Prompts,
    cursor: JsonValue,
    count: int,
    results: Sequence[GroupResult],
    *,
    max_prompt_len: int | None,
    without: Collection[int] = (),
) -> Draw[PromptRow]:
    """The `count` prompts after `cursor` that are none of `without`. Raises BadData where there are none."""
    if isinstance(data, GivenPrompts):
        return data.draw(cursor, count, results, max_prompt_len=max_prompt_len, without=without)
    if config.data.curriculum.policy is None:
        return _in_order(config, data, cursor, count, max_prompt_len, without)
    return _with_curriculum(config, data, cursor, count, results, max_prompt_len, without)


def _in_order(
    config: RunConfig,
    data: PromptData | MixedData,
    cursor: JsonValue,
    count: int,
    max_prompt_len: int | None,
    without: Collection[int],
) -> Draw[PromptRow]:
    seed, shuffle = config.seed, config.data.rollout_shuffle
    if isinstance(data, MixedData):
        return draw_mixed(
            data, cursor, count, seed=seed, shuffle=shuffle, max_prompt_len=max_prompt_len, without=without
        )
    position = drawn_so_far(cursor)  # where a fork has another kind of data, ids of groups go on
    return draw(data, position, count, seed=seed, shuffle=shuffle, max_prompt_len=max_prompt_len, without=without)


def _with_curriculum(
    config: RunConfig,
    data: PromptData | MixedData,
    cursor: JsonValue,
    count: int,
    results: Sequence[GroupResult],
    max_prompt_len: int | None,
    without: Collection[int],
) -> Draw[PromptRow]:
    """Those that come back first, then the next ones of the data."""
    plain = {"drawn": drawn_so_far(cursor), "data": cursor, "curriculum": None}
    before: dict[str, Any] = cursor if isinstance(cursor, dict) and "curriculum" in cursor else plain
    wanted = int(config.data.curriculum.share * count)
    again, state = _choose(config, data, before["curriculum"], results, wanted)
    returning: list[DrawnRow[PromptRow]] = []
    for index in again:
        try:
            row = None if index in without else data.row(index)
        except BadPrompt:
            row = None
        if row is not None and (max_prompt_len is None or len(row.prompt_ids) <= max_prompt_len):
            returning.append(DrawnRow(0, 0, row))
    rest = _in_order(config, data, before["data"], count - len(returning), max_prompt_len, without)
    first = int(before["drawn"])
    rows = [replace(one, group_id=first + number) for number, one in enumerate([*returning, *rest.rows])]
    after: JsonValue = {"drawn": first + len(rows), "data": rest.cursor, "curriculum": state}
    return Draw(rows, after, rest.passed_over + len(again) - len(returning))


def _choose(
    config: RunConfig, data: PromptData | MixedData, state: JsonValue, results: Sequence[GroupResult], wanted: int
) -> tuple[list[int], JsonValue]:
    """What the policy says, checked."""
    name = config.data.curriculum.policy
    assert name is not None
    try:
        own = json.loads(json.dumps(state))  # to do with as it likes: the state lies in a commit
        prompts, after = CURRICULUM.load(name)(own, tuple(results), wanted, config.data.curriculum)
        again, kept = [int(index) for index in prompts], from_json(json.dumps(after))
    # Whatever user code raises is the user's to see.
    except Exception as error:
        raise BadData(
            f"the curriculum {name!r} failed with {error!r}: let it return (prompts, state), the places of prompts in "
            "the data and a JSON value"
        ) from error
    if len(again) > wanted or not all(0 <= index < len(data) for index in again):
        raise BadData(
            f"the curriculum {name!r} chose {len(again)} prompts, {again[:8]} first: let it choose at most {wanted}, "
            f"as it is asked, from 0 to {len(data) - 1}"
        )
    return again, kept
