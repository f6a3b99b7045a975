"""No answer holds a grader of ours for long, whatever a policy writes."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.tasks.rewards import (
    aime,
    boxed,
    dapo,
    deepscaler,
    equality,
    exact_match,
    f1,
    gpqa,
    gsm8k,
    math,
    math500,
    multiple_choice,
    notation,
)
from cairn.tasks.rewards.sample import Sample
from tests.tables import cases

MEGABYTE = 2**20
SECONDS = 1.0
"""CPU time for a megabyte of one shape, or for an answer of any."""
GRADERS: dict[str, Callable[[Sample], Any]] = {
    module.__name__.rpartition(".")[2]: module.grade
    for module in (aime, dapo, deepscaler, exact_match, f1, gpqa, gsm8k, math, math500, multiple_choice)
}
TABLE: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("hostile_answers.yaml").read_text())
SHAPES = TABLE["shapes"]
TOWERS = [
    *TABLE["towers"],
    "(" * 150 + "1" + ")" * 150,
    "\\sqrt{" * 60 + "2" + "}" * 60,
    "\\frac{1}{" * 40 + "2" + "}" * 40,
    "[" * 100,
    "-" * 300 + "1",
    "\\sin(" * 30 + "1" + ")" * 30,
    "0.\\overline{" + "7" * 300 + "}",
    "+".join(f"\\sqrt{{{n}}}" for n in range(2, 30)),
    "\\{" * 40 + "1" + "\\}" * 40,
    ",".join("1" * 150),
]
"""Answers that take ages to compute."""
TOKENS = st.sampled_from([*"0123456789xyn+-*/=^_(){}[]<>,:;!|%$ ", *TABLE["words"]])


def seconds(call: Callable[[], Any]) -> float:
    """CPU time, as of a process that has been warmed up."""
    began = time.process_time()
    call()
    return time.process_time() - began


@pytest.fixture(autouse=True, scope="module")
def warmed_up() -> None:
    assert math.grade(Sample(r"\boxed{(1, x < 2)}", "1")) == 0
    assert math.grade(Sample(r"\boxed{\frac{2x}{2}}", "x")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", GRADERS)
def test_a_megabyte_of_any_shape_is_read_in_a_second(name: str) -> None:
    label = "A" if name in ("gpqa", "multiple_choice") else "18"
    for shape in SHAPES:
        text = shape * (MEGABYTE // len(shape))
        for response in (text, f"</think>\\boxed{{{text}}}", f"Answer: {text}"):
            spent = seconds(partial(GRADERS[name], Sample(response, label)))
            assert spent < SECONDS, (shape, response[:20])


@cases(("name", "label"), [("math", "18"), ("gpqa", "A"), ("multiple_choice", "A")])
def test_twenty_kilobytes_of_any_shape_are_read_at_once(name: str, label: str) -> None:
    for shape in SHAPES:
        text = shape * (20_000 // len(shape))
        sample = Sample(f"{text}\\boxed{{{text}}}", label)
        assert seconds(partial(GRADERS[name], sample)) < SECONDS / 2, shape


@cases("tower", TOWERS)
def test_what_would_take_ages_to_compute_is_wrong_at_once(tower: str) -> None:
    found: list[float] = []
    assert seconds(lambda: found.append(math.grade(Sample(rf"\boxed{{{tower}}}", "18")))) < SECONDS
    assert found == [0]


def test_tags_that_are_special_tokens_are_found_in_a_megabyte() -> None:
    text = "a" * MEGABYTE
    marked = Sample(text, "1", response_with_special_tokens=f"</think>{text[1:]}<|end|>{text}")
    assert seconds(lambda: boxed.answer_of(marked)) < 2 * SECONDS


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(TOKENS, max_size=25).map("".join))
def test_any_answer_is_right_or_wrong_in_a_second_and_equal_to_itself(answer: str) -> None:
    began = time.process_time()
    assert math.is_right(answer, "18") in (True, False)
    notation.integer(answer)
    if notation.read(answer)[0]:
        assert math.is_right(answer, answer)
    assert time.process_time() - began < SECONDS


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(-999, 999), st.integers(1, 99), st.integers(-999, 999), st.integers(1, 99))
def test_fractions_are_equal_where_their_products_are(a: int, b: int, c: int, d: int) -> None:
    assert math.is_right(rf"\frac{{{a}}}{{{b}}}", f"{c}/{d}") == (a * d == b * c)
    assert math.is_right(rf"\frac{{{a * d}}}{{{b * d}}}", f"{a}/{b}")
    assert equality.are_equal(f"({a}, {c})", f"({c}, {a})") == (a == c)
