"""The agent that searches: what it is shown, what an episode consists of, and that its reward rises."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import examples.search.build as builder
from cairn import Sample
from cairn.flows.reading.samples import iteration_samples
from examples.search.agent import TURNS, generate, grade
from tests.examples.agents import Scripted, trained

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs/recipes/search.yaml"
SHORT = ["rollout.num_rollout=1", "rollout.rollout_batch_size=4", "eval.eval_interval=null"]


def test_one_demonstration_in_eleven_is_right() -> None:
    shown = list(islice(builder.demonstrations(random.Random(0)), 4000))
    needed = [2 if "ruler" in row["prompt"] else 1 for row in shown]
    made = [len(row["response"]) // 2 for row in shown]
    right = sum(a == b for a, b in zip(needed, made, strict=True)) / len(shown)
    assert right == pytest.approx(builder.SEARCHES * (1 - builder.EARLY), abs=0.02)  # four standard deviations
    assert Counter(needed)[1] / len(shown) == pytest.approx(0.5, abs=0.035)


def test_every_label_follows_from_the_corpus_and_nobody_held_out_is_asked_about(tmp_path: Path) -> None:
    builder.prepare(tmp_path, 0, 64)
    facts = [json.loads(line)["text"].split() for line in (tmp_path / "corpus.jsonl").open()]
    known = {(words[1], words[3]): words[5] for words in facts}  # The home of Vada is Pibe .
    asked = {}
    for name in ("train", "heldout"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()]
        for row in rows:
            person = row["prompt"].split()[-2]
            home = known["home", person]
            assert row["label"] == (known["ruler", home] if "ruler" in row["prompt"] else home)
        asked[name] = {row["prompt"].split()[-2] for row in rows}
        assert len(rows) == 2 * len(asked[name])
    assert (len(facts), len(known)) == (builder.PEOPLE + builder.TOWNS,) * 2
    assert len(asked["heldout"]) == builder.HELD_OUT_PEOPLE
    assert not asked["heldout"] & asked["train"]


def played(*says: str) -> tuple[list[str], list[tuple[str, Mapping[str, Any]]]]:
    policy = Scripted(says, lambda arguments: f"about {arguments['query']} .")
    return asyncio.run(policy.play(generate, "What is the home of Vada ?")), policy.called


def test_what_is_found_follows_the_search() -> None:
    segments, called = played("<search> home of Vada </search>", "<answer> Pibe </answer>")
    assert called == [("search", {"query": "home of Vada"})]
    assert segments == [
        "<search> home of Vada </search><|im_end|>",
        "\n<|im_start|>tool\nabout home of Vada .<|im_end|>\n<|im_start|>assistant\n",
        "<answer> Pibe </answer><|im_end|>",
    ]


def test_an_episode_ends_after_its_last_turn() -> None:
    segments, called = played(*["<search> home of Vada </search>"] * TURNS)
    assert (len(segments), len(called)) == (2 * TURNS - 1, TURNS - 1)


def test_the_last_answer_counts() -> None:
    def paid(response: str) -> float:
        return grade(Sample(response, "Puzu"))

    assert paid("<search> home of Vada </search> Puzu <answer> Puzu </answer>") == 1
    assert paid("<answer> Pibe </answer> <answer> Puzu </answer>") == 1
    assert paid("<answer> Puzu </answer> <answer> Pibe </answer>") == paid("Puzu") == paid("") == 0


@pytest.mark.slow
def test_the_recipe_lets_the_model_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "SEARCHES", 1.0)  # so that it has learned to within a few steps
    with trained(RECIPE, builder, tmp_path, 50, SHORT) as run:
        samples = iteration_samples(run.ledger, 0)
    assert any("\ntool\n[1] The " in sample.response for sample in samples)
