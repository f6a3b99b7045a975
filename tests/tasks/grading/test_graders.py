"""What counts as a right answer."""

import re
from pathlib import Path

import pytest
import yaml

from cairn.configs.kinds import REWARD
from cairn.configs.plugins import BadPlugin, load_callable
from cairn.configs.schema.reward import RewardConfig
from cairn.tasks.grading.graders import get_grader
from cairn.tasks.rewards import aime, exact_match, gsm8k, gsm8k_strict, math, multiple_choice, random
from cairn.tasks.rewards.boxed import UnclosedBox, after_thinking, last_boxed
from cairn.tasks.rewards.sample import Sample
from tests.tables import cases

MATH_ANSWERS = [
    (
        entry["kind"],
        Sample(response, **{field: entry[field] for field in ("label", "prompt", "finish_reason") if field in entry}),
        verdict,
    )
    for entry in yaml.safe_load(Path(__file__).with_name("math_answers.yaml").read_text())
    for verdict in ("right", "wrong")
    for response in entry[verdict]
]


@cases(
    ("text", "answer"),
    [
        (r"\boxed{7}", "7"),
        (r"first \boxed{1}, then \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}} !", r"\frac{1}{2}"),
        (r"\boxed{a{b}{c{d}}}}", "a{b}{c{d}}"),
        (r"\boxed{}", ""),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{[0, 1\}}", r"[0, 1\}"),
        ("no box", None),
        (r"\boxed 7", None),
    ],
)
def test_the_last_box_is_found(text, answer):
    assert last_boxed(text) == answer


@cases("text", [r"\boxed{", r"\boxed{18", r"\boxed{3} and \boxed{4", r"\boxed{\boxed{5}", r"\boxed{7\}"])
def test_a_text_that_ends_within_its_last_box_holds_no_answer(text):
    with pytest.raises(UnclosedBox):
        last_boxed(text)
    for grader in (math, exact_match):
        assert grader.grade(Sample(f"it is 18: {text}", "18")) == 0.0


def test_what_was_thought_is_no_answer():
    assert after_thinking("<think>1</think>2</think>3") == "3"
    assert after_thinking("1</think>2") == "2"
    assert after_thinking("2") == "2"
    assert after_thinking("<think>1</think><think>2") == ""
    assert after_thinking("1", opened=True) == ""
    assert after_thinking("1</think>2", opened=True) == "2"
    assert exact_match.grade(Sample(r"<think>\boxed{18}</think> 20", "20")) == 1.0
    assert exact_match.grade(Sample("<think>it is 18", "18")) == 0.0


@cases(
    ("response", "label", "reward"),
    [
        (r"so \boxed{1 3 4 7 9}", "1 3 4 7 9", 1),
        (r"\boxed{ 1  3 }", "1 3", 1),
        (r"\boxed{1} \boxed{2}", "2", 1),
        ("it is 12, no, 13.", "13", 1),
        ("it costs 1,234.50 dollars", "1234.50", 1),
        ("1234", "1,234", 1),
        ("-5", "-5", 1),
        ("10-5", "5", 1),
        ("7, 8,9", "9", 1),
        (r"\boxed{1 3 4 9 7}", "1 3 4 7 9", 0),
        (r"\boxed{134}", "1 3 4", 0),
        (r"2 \boxed{1}", "2", 0),
        (r"\boxed{0.50}", "0.5", 0),
        ("", "1", 0),
        ("none", "1", 0),
        (r"\boxed{1 3 4", "1 3 4", 0),
    ],
)
def test_exact_match_takes_the_label_letter_by_letter_and_nothing_else(response, label, reward):
    assert exact_match.grade(Sample(response, label)) == reward


@cases(("kind", "sample", "verdict"), MATH_ANSWERS)
def test_math_judges_an_answer_as_a_reader_would_and_exact_match_finds_the_same(kind, sample, verdict):
    assert math.grade(sample) == (verdict == "right")
    if re.search("think|cut off|which box", kind):
        assert exact_match.grade(sample) == (verdict == "right")


@cases(
    ("written", "finish_reason", "reward"),
    [
        (r"17</think>\boxed{18}<|end|>", "stop", 1.0),
        (r"\boxed{17}</think>It is 18.<|end|>", "stop", 1.0),
        (r"\boxed{18}</think>It is 17.<|end|>", "stop", 0.0),
        (r"\boxed{18}", "length", 0.0),
        (r"\boxed{18}<|end|>", "stop", 0.0),
    ],
)
def test_thinking_ends_where_a_tokenizer_that_counts_its_tags_as_special_says(written, finish_reason, reward):
    response = written.replace("</think>", "").replace("<|end|>", "")
    sample = Sample(
        response, "18", response_with_special_tokens=written, prompt="<think>\n", finish_reason=finish_reason
    )
    for grader in (math, exact_match):
        assert grader.grade(sample) == reward


def test_a_label_that_cannot_be_met_is_an_error_and_not_a_wrong_answer():
    for grader in (math, exact_match):
        with pytest.raises(ValueError, match="needs a label"):
            grader.grade(Sample("1", None))
    with pytest.raises(ValueError, match="no expression in the label ''"):
        math.grade(Sample("1", ""))


def test_random_is_a_fair_coin_that_falls_the_same_way_again():
    rewards = [random.grade(Sample(f"response {i}", "label")) for i in range(4000)]
    assert rewards == [random.grade(Sample(f"response {i}", "label")) for i in range(4000)]
    assert set(rewards) == {0.0, 1.0}
    # Four standard deviations of a binomial mean: 4 × sqrt(0.25 / 4000) = 0.032.
    assert abs(sum(rewards) / 4000 - 0.5) < 0.032


def test_every_built_in_grader_has_a_version_and_can_be_loaded():
    graders = [get_grader(RewardConfig(rm_type=name)) for name in ("math", "exact_match", "random")]
    assert len({grader.version for grader in graders}) == 3
    assert "math-verify" in graders[0].version
    for grader in graders:
        assert load_callable(grader.path)(Sample("1", "1")) in (0.0, 1.0)


def test_the_page_on_rewards_has_every_grader_of_ours():
    page = Path(__file__).parents[3] / "docs" / "rewards.md"
    table = page.read_text(encoding="utf-8").partition("| `rm_type` |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == REWARD.built_in_names()


def test_a_grader_of_ones_own_has_the_version_of_its_source(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def grade(response, label, metadata):\n    return 1.0\n")
    one = get_grader(RewardConfig(custom_rm_path=f"{path}:grade"))
    other = tmp_path / "other.py"
    other.write_text("def grade(response, label, metadata):\n    return 0.5\n")
    two = get_grader(RewardConfig(custom_rm_path=f"{other}:grade"))
    assert one.version != two.version
    assert one.name == f"{path}:grade"


def test_an_unknown_grader_is_named_beside_the_known_ones():
    with pytest.raises(BadPlugin, match=r"no grader 'maths': set rm_type to one of aime, .*, math, .*random, .*, or"):
        get_grader(RewardConfig(rm_type="maths"))


@cases(
    ("response", "label", "flexible", "strict"),
    [
        ("She makes 9 * 2 = $18 every day.\n#### 18", "18", 1, 1),
        ("It is $1,250.", "1250", 1, 0),
        ("#### 18\nThat is all, in 2 steps.", "18", 0, 1),
        ("#### 18.\n", "… so it is 18\n#### 18", 1, 1),
        ("#### 17\n#### 18", "18", 1, 0),
        ("It is -3.", "-3", 1, 0),
        ("It is 18.00", "18", 0, 0),
        ("<think>#### 18", "18", 0, 0),
        ("<think>17</think>18", "18", 1, 0),
        ("no idea", "18", 0, 0),
    ],
)
def test_gsm8k_takes_the_last_number_and_tells_the_marked_one(response, label, flexible, strict):
    found = gsm8k.grade(Sample(response, label))
    assert (found["reward"], found["flexible"], found["strict"]) == (flexible, flexible, strict)
    assert gsm8k_strict.grade(Sample(response, label))["reward"] == strict


def test_gsm8k_takes_no_last_number_of_a_response_that_was_cut_off():
    assert gsm8k.grade(Sample("18", "18", finish_reason="length"))["reward"] == 0
    assert gsm8k_strict.grade(Sample("#### 18\nand", "18", finish_reason="length"))["reward"] == 1


def test_aime_takes_an_integer_and_nothing_else():
    accepted = (r"\boxed{033}", r"\boxed{33}", r"$\boxed{n = 33}$", r"\boxed{33^\circ}", "It is $33$.")
    right = {"reward": 1.0, "strict": 1.0, "answer": "33"}
    assert [response for response in accepted if aime.grade(Sample(response, "033")) != right] == []
    left = (r"\boxed{66/2}", r"\boxed{1033}", r"\boxed{-33}", r"\boxed{33.0}", r"33 \boxed{34}", "33 or 34", "3.33")
    assert [answer for answer in (*left, "33^2", "") if aime.grade(Sample(answer, "33"))["reward"] != 0] == []


def test_aime_takes_no_last_integer_of_a_response_that_was_cut_off():
    assert aime.grade(Sample("It is 33", "33", finish_reason="length"))["answer"] is None
    assert aime.grade(Sample(r"\boxed{33} and", "33", finish_reason="length"))["reward"] == 1


@cases(
    ("response", "answer"),
    [
        ("(A) is wrong, so the answer is (B).", "B"),
        ("The answer is B", "B"),
        ("**Answer:** (B)", "B"),
        (r"The answer is $\boxed{\text{B}}$", "B"),
        (r"Not (A). \boxed{B}", "B"),
        (r"Not (A). \boxed{(B)}", "B"),
        ("Not (A) but (B), as I said", "B"),
        ("The answer is (A). No: the answer is (B).", "B"),
        ("The answer is a matter of taste: (B)", "B"),
        ("The answer is (E), I mean (B)", "B"),
        ("<think>The answer is (A)</think>(B)", "B"),
        ("B", "B"),
        (r"\boxed{7}, not (B)", None),
        (r"The one that is not a metal is \boxed{B}", "B"),
        (r"It is not $\mathbf{\boxed{B}}$", None),
        ("The answer is (B). That is wrong. It is (C).", None),
        ("The answer is (B), I mean (C)", None),
    ],
)
def test_multiple_choice_takes_the_letter_that_is_said_to_be_the_answer(response, answer):
    sample = Sample(response, "B", {"choices": ["w", "x", "y", "z"]})
    assert multiple_choice.grade(sample) == {"reward": float(answer == "B"), "answer": answer}


def test_multiple_choice_takes_no_last_letter_of_a_response_that_was_cut_off():
    assert multiple_choice.grade(Sample("(B)", "B", finish_reason="length"))["reward"] == 0
