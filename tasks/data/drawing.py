"""Selection of the next prompts: from one data set, from several, or from a function, with a curriculum before them.

| data | cursor |
|---|---|
| one data set | the position in its stream, a number |
| a mixture | `{"drawn": …, "sources": {name: {"position": …, "owed": …}}}` |
| a source with a state | `{"drawn": …, "state": …}` |
| any of the first two with a curriculum | `{"drawn": …, "data": its cursor, "curriculum": the policy's state}` |

Every rollout and filter step commits the cursor, which is 0 at the beginning of a run. A draw is a pure function of the
cursor and of the results of the prompts of the round before, which a commit holds. So a run that is resumed, forked or
replayed draws the same prompts.
"""

import json
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from pydantic import JsonValue

from cairn.configs.errors import BadData
from cairn.configs.kinds import CURRICULUM
from cairn.configs.schema.data import MixedSource
from cairn.configs.schema.run import RunConfig
from cairn.storage.store import canonical
from cairn.storage.store.canonical import from_json
from cairn.tasks.data.prompts import Check, PromptData, PromptRow
from cairn.tasks.data.stream import Draw, GroupResult, StatefulPrompts, draw, drawn_so_far, row_at, usable_row

# Several data sets, drawn from by weight.


@dataclass(frozen=True)
class _Part:
    """Source of a mixture. Its rows know their index in the whole mixture and the name of their source."""

    name: str
    data: PromptData
    start: int

    @property
    def path(self) -> str:
        return self.data.path

    def __len__(self) -> int:
        return len(self.data)

    def row(self, index: int) -> PromptRow:
        row = self.data.row(index)
        return replace(row, index=self.start + index, metadata={**(row.metadata or {}), "source": self.name})


class MixedData:
    """Mixture of several data sets, drawn from by weight. Prompts are numbered through the data sets in their order.

    Each source has a stream of its own, with its own order, epochs and position. With every prompt that is drawn, each
    source is owed its share of one prompt, and the source that is owed most is drawn from (smooth weighted
    round-robin). So any stretch of the mixture has the proportions of the weights, to within a few prompts, and a
    skipped prompt costs its source nothing.

    The cursor holds `drawn`, the number of prompts drawn and thus the next group's id, and for each source its
    `position` and what it is `owed`. A source that a fork adds starts at its beginning, owed nothing. Weights that a
    fork changes apply from the fork on.
    """

    def __init__(self, sources: Sequence[MixedSource], opened: Sequence[PromptData]) -> None:
        starts = [0, *accumulate(map(len, opened))]
        names = [source.name for source in sources]
        self.parts = [_Part(*one) for one in zip(names, opened, starts[:-1], strict=True)]
        total = sum(source.weight for source in sources)
        self.weights = [source.weight / total for source in sources]
        self._ends = starts[1:]

    @classmethod
    def open(
        cls,
        sources: Sequence[MixedSource],
        tokenizer: Any,
        check: Check | None = None,
        tools: list[Any] | None = None,
        workers: int = 0,
    ) -> "MixedData":
        """Open each source as `PromptData.open` does."""
        return cls(sources, [PromptData.open(one, one.path, tokenizer, check, tools, workers) for one in sources])

    @property
    def path(self) -> str:
        """Name of the data in messages."""
        return " + ".join(part.path for part in self.parts)

    @property
    def fingerprints(self) -> dict[str, str]:
        """SHA-256, in hex, of all that each source provides, by its name."""
        return {part.name: part.data.fingerprint for part in self.parts}

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of the fingerprints by name."""
        return canonical.digest(self.fingerprints)

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, index: int) -> PromptRow:
        """Return the prompt at `index`, with its source in the metadata. Raises BadPrompt as `PromptData.row` does."""
        part = self._part(index)
        return part.row(index - part.start)

    def source_of(self, index: int) -> str:
        """Return the name of a prompt's source."""
        return self._part(index).name

    def _part(self, index: int) -> _Part:
        return self.parts[bisect_right(self._ends, index)]


def draw_mixed(
    data: MixedData,
    cursor: JsonValue,
    count: int,
    *,
    seed: int,
    shuffle: bool,
    max_prompt_len: int | None,
    without: Collection[int] = (),
) -> Draw[PromptRow]:
    """Return the next `count` prompts after `cursor`, which is the position 0 or what a draw of a mixture left. The
    other arguments and the errors are those of `draw`."""
    # A fork without the parent's curriculum finds the mixture's cursor below the curriculum's.
    places = cursor.get("data", cursor) if isinstance(cursor, dict) else {}
    before: Any = places.get("sources", {}) if isinstance(places, dict) else {}
    left: dict[str, Any] = {part.name: dict(before.get(part.name, {"position": 0, "owed": 0.0})) for part in data.parts}
    hidden = [
        {index - part.start for index in without if 0 <= index - part.start < len(part)} if without else ()
        for part in data.parts
    ]
    rows: list[PromptRow] = []
    drawn, passed_over = drawn_so_far(cursor), 0
    while len(rows) < count:
        for part, weight in zip(data.parts, data.weights, strict=True):
            left[part.name]["owed"] += weight
        number = max(range(len(data.parts)), key=lambda k: left[data.parts[k].name]["owed"])
        part, place = data.parts[number], left[data.parts[number].name]
        one = draw(
            part,
            place["position"],
            1,
            seed=f"{seed}/{part.name}",
            shuffle=shuffle,
            max_prompt_len=max_prompt_len,
            without=hidden[number],
        )
        rows.append(replace(one.rows[0], group_id=drawn))
        place["position"], place["owed"] = one.cursor, place["owed"] - 1
        drawn, passed_over = drawn + 1, passed_over + one.passed_over
    for part in data.parts:
        n, place = len(part), left[part.name]["position"]
        ahead = min(n, sum(part.start <= row.index < part.start + n for row in rows))
        part.data.prepare(row_at(one, n, f"{seed}/{part.name}", shuffle) for one in range(place, place + ahead))
    return Draw(rows, {"drawn": drawn, "sources": left}, passed_over)


Prompts = PromptData | MixedData | StatefulPrompts


def learns_from_results(config: RunConfig) -> bool:
    """Whether the choice of the next prompts depends on the results of those before."""
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
    """Return the `count` prompts after `cursor` that are not among `without`. Raises BadData if there are none."""
    if isinstance(data, StatefulPrompts):
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
    position = drawn_so_far(cursor)  # ids of groups continue where a fork has another kind of data
    return draw(
        data,
        position,
        count,
        seed=seed,
        shuffle=shuffle,
        max_prompt_len=max_prompt_len,
        without=without,
        prepare=data.prepare,
    )


def _with_curriculum(
    config: RunConfig,
    data: PromptData | MixedData,
    cursor: JsonValue,
    count: int,
    results: Sequence[GroupResult],
    max_prompt_len: int | None,
    without: Collection[int],
) -> Draw[PromptRow]:
    """Return the prompts that the curriculum repeats, then the next ones of the data."""
    plain = {"drawn": drawn_so_far(cursor), "data": cursor, "curriculum": None}
    before: dict[str, Any] = cursor if isinstance(cursor, dict) and "curriculum" in cursor else plain
    wanted = int(config.data.curriculum.share * count)
    repeated, state = _choose(config, data, before["curriculum"], results, wanted)
    usable = (usable_row(data, index, max_prompt_len) for index in repeated if index not in without)
    returning = [row for row in usable if row is not None]
    rest = _in_order(config, data, before["data"], count - len(returning), max_prompt_len, without)
    first = int(before["drawn"])
    rows = [replace(one, group_id=first + number) for number, one in enumerate([*returning, *rest.rows])]
    after: JsonValue = {"drawn": first + len(rows), "data": rest.cursor, "curriculum": state}
    return Draw(rows, after, rest.passed_over + len(repeated) - len(returning))


def _choose(
    config: RunConfig, data: PromptData | MixedData, state: JsonValue, results: Sequence[GroupResult], wanted: int
) -> tuple[list[int], JsonValue]:
    """Return the prompts and the state that the policy chooses, checked. Raises BadData."""
    name = config.data.curriculum.policy
    assert name is not None
    try:
        own = json.loads(json.dumps(state))  # a copy that the policy may change: the state lies in a commit
        prompts, after = CURRICULUM.load(name)(own, tuple(results), wanted, config.data.curriculum)
        chosen, new_state = [int(index) for index in prompts], from_json(json.dumps(after))
    # User code may raise any exception. Show it to the user.
    except Exception as error:
        raise BadData(
            f"the curriculum {name!r} failed with {error!r}: let it return (prompts, state): the positions of "
            "prompts in the data and a JSON value"
        ) from error
    if len(chosen) > wanted or not all(0 <= index < len(data) for index in chosen):
        raise BadData(
            f"the curriculum {name!r} chose {len(chosen)} prompts, {chosen[:8]} first: let it choose at most {wanted}, "
            f"each from 0 to {len(data) - 1}"
        )
    return chosen, new_state
