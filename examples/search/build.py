"""Questions about people who are unknown to a tiny model, and an index that it may search:
`python -m examples.search.build`.

    Who is the ruler of the home of Vada ?
    <search> home of Vada </search>      ->   [1] The home of Vada is Pibe .
    <search> ruler of Pibe </search>     ->   [1] The ruler of Pibe is Puzu .
    <answer> Puzu </answer>

Half of the questions need one search, the others two. Each demonstration has newly drawn names. Most answer with the
name in the question; of those that search, most answer one search too early. So a model that imitates them is right one
time in eleven. Held-out questions are about people who are in no training question.

    build/search/
        demonstrations.jsonl   of the warm start: chats, some with searches
        corpus.jsonl           320 facts, one a line
        train.jsonl            questions and labels to learn from
        heldout.jsonl          others, for evaluation
        untrained/             the model before its warm start, and its tokenizer
        runs/warm-start/       the ledger of the warm start
        model/                 the warm-started model
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.building import begin, build_by_command, write_rows

FOLDER = Path("build/search")
PEOPLE, HELD_OUT_PEOPLE, TOWNS = 256, 64, 64

SEARCHES = 0.3
"""Share of the demonstrations that search."""
EARLY = 0.7
"""Share of these that answer a look-up too early."""

STEPS = 300
"""Optimizer steps of the warm start."""


def main() -> None:
    """Command line."""
    build_by_command("the model and the data of the search", FOLDER, build)


def build(folder: Path, seed: int) -> None:
    """Write the folder."""
    from examples.quickstart.warm_start import BATCH, warm_start, write_model

    prepare(folder, seed, BATCH * STEPS)
    warm_start(folder, STEPS)
    write_model(folder)


def prepare(folder: Path, seed: int, shown: int) -> None:
    """Write the data, so many demonstrations among them, and the model before its warm start."""
    begin(folder, list(itertools.islice(demonstrations(random.Random(f"demonstrations/{seed}")), shown)), seed)
    homes, rulers = world(random.Random(f"world/{seed}"))
    facts = [*(home_is(*one) for one in homes.items()), *(ruler_is(*one) for one in rulers.items())]
    write_rows(folder / "corpus.jsonl", ({"text": fact} for fact in facts))
    rows = [row for person, town in homes.items() for row in questions(person, town, rulers[town])]
    write_rows(folder / "heldout.jsonl", rows[: 2 * HELD_OUT_PEOPLE])
    write_rows(folder / "train.jsonl", rows[2 * HELD_OUT_PEOPLE :])


def world(rng: random.Random) -> tuple[dict[str, str], dict[str, str]]:
    """The home of everybody, and the ruler of every town."""
    drawn = names(rng, PEOPLE + 2 * TOWNS)
    towns, rulers, people = drawn[:TOWNS], drawn[TOWNS : 2 * TOWNS], drawn[2 * TOWNS :]
    return {person: rng.choice(towns) for person in people}, dict(zip(towns, rulers, strict=True))


def names(rng: random.Random, count: int) -> list[str]:
    """So many that differ."""
    found = dict[str, None]()
    while len(found) < count:
        found["".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(2)).capitalize()] = None
    return list(found)


def home_is(person: str, town: str) -> str:
    """A fact."""
    return f"The home of {person} is {town} ."


def ruler_is(town: str, ruler: str) -> str:
    """A fact."""
    return f"The ruler of {town} is {ruler} ."


def questions(person: str, town: str, ruler: str) -> tuple[dict[str, str], dict[str, str]]:
    """One that needs one look-up, and one that needs two."""
    return (
        {"prompt": f"What is the home of {person} ?", "label": town},
        {"prompt": f"Who is the ruler of the home of {person} ?", "label": ruler},
    )


def demonstrations(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Questions, each with the chat that follows it."""
    while True:
        person, town, ruler = names(rng, 3)
        hops = rng.choice((1, 2))
        found = 0 if rng.random() >= SEARCHES else hops - 1 if rng.random() < EARLY else hops
        searches = (
            (f"<search> home of {person} </search>", f"[1] {home_is(person, town)}"),
            (f"<search> ruler of {town} </search>", f"[1] {ruler_is(town, ruler)}"),
        )
        turns = [*itertools.chain(*searches[:found]), f"<answer> {(person, town, ruler)[found]} </answer>"]
        yield {
            "prompt": questions(person, town, ruler)[hops - 1]["prompt"],
            "response": [
                {"role": role, "content": text}
                for role, text in zip(itertools.cycle(("assistant", "tool")), turns, strict=False)
            ],
        }


if __name__ == "__main__":
    main()
