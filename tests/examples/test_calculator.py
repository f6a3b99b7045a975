"""The calculator agent: what it is shown, what an episode consists of, and that its reward rises."""

import asyncio
import random
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import examples.calculator.build as builder
from cairn import Sample, ToolFailed
from cairn.flows.reading.samples import iteration_samples
from cairn.flows.reading.views import run_status
from examples.calculator.agent import TURNS, generate, grade
from tests.examples.agents import Scripted, trained

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs/recipes/calculator.yaml"


def test_one_demonstration_in_sixteen_is_right_and_one_in_four_asks() -> None:
    shown = list(islice(builder.demonstrations(random.Random(0)), 4000))
    asking = [row["response"] for row in shown if len(row["response"]) == 3]
    assert len(asking) / len(shown) == pytest.approx(builder.CALLS, abs=0.03)  # four standard deviations
    right = [row for row in shown if row["response"][-1]["content"] == f"\\boxed{{{value(row['prompt'])}}}"]
    assert len(right) / len(shown) == pytest.approx(builder.CALLS * (1 - builder.WRONG_CALLS), abs=0.016)
    for call, told, answer in asking:
        expression = call["content"].removeprefix("<call>").removesuffix("</call>")
        assert told["content"] == str(value(expression))
        assert answer["content"] == f"\\boxed{{{told['content']}}}"


def test_no_held_out_question_is_shown_or_trained_on() -> None:
    held_out = {one.question for one in islice(builder.problems(random.Random(0), held_out=True), 2000)}
    trained = {one.question for one in islice(builder.problems(random.Random(1), held_out=False), 20000)}
    shown = {row["prompt"] for row in islice(builder.demonstrations(random.Random(2)), 20000)}
    assert len(held_out) > 1900
    assert not held_out & (trained | shown)


def value(text: str) -> int:
    """Worked out by itself."""
    found = re.search(r"(\d+)\*(\d+)([+-]\d+)", text)
    assert found is not None
    return int(found[1]) * int(found[2]) + int(found[3])


def played(*says: str) -> tuple[list[str], list[Mapping[str, Any]]]:
    def calculate(arguments: Mapping[str, Any]) -> float:
        if arguments["expression"] == "37*":
            raise ToolFailed("calculator: no expression")
        return value(arguments["expression"])

    policy = Scripted(says, calculate)
    segments = asyncio.run(policy.play(generate, "What is 37*48+5?"))
    assert {name for name, _ in policy.called} <= {"calculator"}
    return segments, [arguments for _, arguments in policy.called]


def told(result: str) -> str:
    return f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"


def test_a_call_is_answered_by_the_calculator() -> None:
    segments, called = played("<call>37*48+5</call>", "\\boxed{1781}")
    assert called == [{"expression": "37*48+5"}]
    assert segments == ["<call>37*48+5</call><|im_end|>", told("1781"), "\\boxed{1781}<|im_end|>"]


def test_what_cannot_be_calculated_is_an_error_that_the_model_is_told_of() -> None:
    segments, _ = played("<call>37*</call>", "<call>37*48+5</call>", "\\boxed{1781}")
    assert segments[1::2] == [told("error"), told("1781")]


def test_an_episode_ends_after_its_last_turn() -> None:
    segments, called = played(*["<call>37*48+5</call>"] * TURNS)
    assert (len(segments), len(called)) == (2 * TURNS - 1, TURNS - 1)


def test_the_last_box_counts_and_the_calculator_answers_nothing_by_itself() -> None:
    def paid(response: str) -> float:
        return grade(Sample(response, "1781"))

    assert paid("<call>37*48+5</call>\ntool\n1781\nassistant\n\\boxed{1781}") == 1
    assert paid("\\boxed{1} \\boxed{1781}") == 1
    assert paid("<call>37*48+5</call>\ntool\n1781\nassistant\n") == 0
    assert paid("\\boxed{1781} \\boxed{178}") == paid("") == paid("1781") == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_model_calls_and_its_reward_rises_from_a_tenth_to_four_fifths(tmp_path: Path) -> None:
    with trained(RECIPE, builder, tmp_path, builder.STEPS) as run:
        samples = iteration_samples(run.ledger, 0)
        heldout = run_status(run.ledger.store, run.ledger.run).eval["heldout"]
    assert heldout.first is not None
    assert heldout.first <= 0.1
    assert heldout.last >= 0.8
    assert any(re.search(r"\ntool\n-?\d+\nassistant\n", sample.response) for sample in samples)
