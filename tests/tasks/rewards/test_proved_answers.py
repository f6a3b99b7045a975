"""Graders pay what they can prove to be the label, and nothing else."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from cairn.tasks.rewards import aime, dapo, deepscaler, gpqa, math, multiple_choice
from cairn.tasks.rewards.sample import Sample
from tests.tables import cases

ENTRIES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("proved_answers.yaml").read_text())
GRADERS: dict[str, Any] = {
    "math": math,
    "math_text": math,
    "aime": aime,
    "dapo": dapo,
    "gpqa": gpqa,
    "multiple_choice": multiple_choice,
}
ADDED: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("additions.yaml").read_text())
ADDED_AND_TRUE = {"2, 3 - 1"}
MISSED = 0.02
"""The share of right answers that may stay unpaid."""


def is_paid(grader: str, answer: str, entry: dict[str, Any]) -> bool:
    metadata = {"choices": entry["choices"]} if "choices" in entry else {}
    found = GRADERS[grader].grade(
        Sample(rf"\boxed{{{answer}}}" if grader == "math" else answer, entry["label"], metadata)
    )
    if isinstance(found, dict) and "strict" in found:
        assert found["strict"] <= found["reward"], "what is proved is paid"
    return bool((found["reward"] if isinstance(found, dict) else found) == 1)


@pytest.mark.proof
def test_no_wrong_answer_is_paid_and_hardly_a_right_one_missed() -> None:
    counts: Counter[str] = Counter()
    paid, missed = [], []
    for entry in ENTRIES:
        for verdict in ("right", "wrong"):
            for answer in entry[verdict]:
                counts[verdict] += 1
                is_one = is_paid(entry["grader"], answer, entry)
                if is_one and verdict == "wrong":
                    paid.append((entry["grader"], entry["kind"], entry["label"], answer))
                if not is_one and verdict == "right":
                    missed.append((entry["grader"], entry["kind"], entry["label"], answer))
    assert paid == []
    assert len(missed) <= MISSED * counts["right"], missed
    assert counts.total() >= 600


def test_no_answer_stands_twice() -> None:
    answers = Counter(
        (entry["grader"], entry["label"], answer, str(entry.get("choices")))
        for entry in ENTRIES
        for answer in [*entry["right"], *entry["wrong"]]
    )
    assert [answer for answer, count in answers.items() if count > 1] == []


def test_deepscaler_proves_the_same() -> None:
    apart = []
    for entry in [entry for entry in ENTRIES if entry["grader"] == "math"][:12]:
        for answer in [*entry["right"], *entry["wrong"]]:
            expected = math.grade(Sample(rf"\boxed{{{answer}}}", entry["label"]))
            if deepscaler.grade(Sample(rf"so</think>\boxed{{{answer}}}", entry["label"])) != expected:
                apart.append((entry["label"], answer))
    assert apart == []


@cases("label", ["3", "-18", r"\frac{7}{2}", "0.25", r"\sqrt{2}", "(1, 2)", "2, 3"])
def test_what_is_added_to_a_right_answer_makes_it_wrong(label: str) -> None:
    assert math.is_right(label, label)
    added = [before + label for before in ADDED["before"]] + [label + behind for behind in ADDED["behind"]]
    assert [answer for answer in added if answer not in ADDED_AND_TRUE and math.is_right(answer, label)] == []
