"""Several data sets, drawn from by weight.

Each has a stream of its own: its own order, its own epochs, its own place. Which one the next prompt is of is for the
weights to say: each source is owed its share of every prompt that was drawn, and the one that is owed most is drawn
from (smooth weighted round-robin). So any stretch of the mixture has the proportions of the weights, to within a few
prompts, and a prompt that is passed over costs its source nothing.

What is to be remembered is the cursor: `drawn`, how many prompts were, which is the next group's id; and of each source
its `position` and what it is `owed`. A source that a fork adds begins at its beginning, owed nothing; weights that a
fork changes hold from there on.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from pydantic import JsonValue

from cairn.configs.schema.data import MixedSource
from cairn.storage import canonical
from cairn.tasks.data.prompts import Check, PromptData, PromptRow
from cairn.tasks.data.stream import Draw, DrawnRow, draw, drawn_so_far


@dataclass(frozen=True)
class _Part:
    """One source, whose rows know their place in the whole and where they are from."""

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
    """The prompts of several data sets, numbered through in their order."""

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
        is_new: bool = True,
    ) -> "MixedData":
        """Open each as `PromptData.open` does."""
        return cls(sources, [PromptData.open(one, one.path, tokenizer, check, tools, is_new) for one in sources])

    @property
    def path(self) -> str:
        """The data, as messages name it."""
        return " + ".join(part.path for part in self.parts)

    @property
    def fingerprints(self) -> dict[str, str]:
        """sha256, in hex, of all that each source gives, by its name."""
        return {part.name: part.data.fingerprint for part in self.parts}

    @property
    def fingerprint(self) -> str:
        """sha256, in hex, of the fingerprints, by name."""
        return canonical.digest(self.fingerprints)

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, index: int) -> PromptRow:
        """The prompt at `index`, its source among its metadata. Raises BadPrompt as `PromptData.row`."""
        part = self._part(index)
        return part.row(index - part.start)

    def source_of(self, index: int) -> str:
        """Name of the source of a prompt."""
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
    """The next `count` prompts after `cursor`: the position 0, or what a draw of a mixture left. As `draw`."""
    places = (
        cursor.get("data", cursor) if isinstance(cursor, dict) else {}
    )  # below a curriculum that a fork has no more
    before: Any = places.get("sources", {}) if isinstance(places, dict) else {}
    left: dict[str, Any] = {part.name: dict(before.get(part.name, {"position": 0, "owed": 0.0})) for part in data.parts}
    hidden = [
        {index - part.start for index in without if 0 <= index - part.start < len(part)} if without else ()
        for part in data.parts
    ]
    rows: list[DrawnRow[PromptRow]] = []
    drawn, passed_over = drawn_so_far(cursor), 0
    while len(rows) < count:
        for part, weight in zip(data.parts, data.weights, strict=True):
            left[part.name]["owed"] += weight
        number = max(range(len(data.parts)), key=lambda k: left[data.parts[k].name]["owed"])
        part, place = data.parts[number], left[data.parts[number].name]
        found = draw(
            part,
            place["position"],
            1,
            seed=f"{seed}/{part.name}",
            shuffle=shuffle,
            max_prompt_len=max_prompt_len,
            without=hidden[number],
        )
        rows.append(replace(found.rows[0], group_id=drawn))
        place["position"], place["owed"] = found.cursor, place["owed"] - 1
        drawn, passed_over = drawn + 1, passed_over + found.passed_over
    return Draw(rows, {"drawn": drawn, "sources": left}, passed_over)
