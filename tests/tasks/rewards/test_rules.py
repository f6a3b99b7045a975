"""The graders that slime names: a table of what they pay, and what slime's own functions pay."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.reward import RewardConfig
from cairn.tasks.grading.graders import get_grader, require_findable_answer, row_check
from cairn.tasks.grading.pool import GraderPool
from cairn.tasks.rewards import dapo, deepscaler, f1, gpqa
from cairn.tasks.rewards.boxed import in_box
from cairn.tasks.rewards.sample import Sample
from tests.tables import cases

ANSWERS = [
    (name, case)
    for name, cases in yaml.safe_load(Path(__file__).with_name("rule_answers.yaml").read_text()).items()
    for case in cases
]
GRADERS: dict[str, Any] = {"dapo": dapo, "deepscaler": deepscaler, "f1": f1, "gpqa": gpqa}
WORDS = st.lists(st.sampled_from(["cat", "sat", "mat", "The", "a", "7"]), min_size=1).map(" ".join)
LABELS = WORDS.filter(lambda text: not {"a", "the"} >= set(text.lower().split()))


def paid(name: str, sample: Sample) -> float:
    boxed = name.startswith("boxed_")
    found = GRADERS[name.removeprefix("boxed_")].grade(in_box(sample) if boxed else sample)
    return float(found["reward"] if isinstance(found, dict) else found)


@cases(("name", "case"), ANSWERS)
def test_what_is_paid(name: str, case: dict[str, Any]) -> None:
    sample = Sample(case["response"], case["label"], case.get("metadata", {}))
    assert paid(name, sample) == pytest.approx(case["reward"], abs=1e-6)
    assert case.get("slime") != case["reward"], "only where it is something else"


def test_thoughts_may_end_with_a_special_token_and_begin_with_the_template() -> None:
    marked = {"response_with_special_tokens": r"5</think>\boxed{6}<|end|>", "prompt": "<think>\n"}
    assert deepscaler.grade(Sample(r"5\boxed{6}", "6", **marked)) == 1.0  # type: ignore[arg-type]
    assert deepscaler.grade(Sample(r"\boxed{6}", "6", prompt="<think>\n")) == 0.0


def test_dapo_takes_no_answer_at_which_a_response_was_cut_off() -> None:
    cut = {"finish_reason": "length"}
    assert dapo.grade(Sample("Answer: 18", "185", **cut))["pred"] == "[INVALID]"  # type: ignore[arg-type]
    whole = dapo.grade(Sample("Answer: 18\nSo it", "18", **cut))  # type: ignore[arg-type]
    assert whole == {"reward": 1.0, "score": 1.0, "acc": True, "pred": "18"}


@cases(
    ("name", "label", "message"),
    [
        ("dapo", "one half", "needs an integer"),
        ("dapo", "18.5", "needs an integer"),
        ("dapo", "inf", "needs an integer"),
        ("dapo", None, "needs an integer"),
        ("f1", None, "needs a label"),
        ("f1", "A", "needs a label with words"),
        ("deepscaler", None, "needs a label"),
        ("deepscaler", "", "no expression in the label"),
        ("gpqa", None, "needs a label"),
        ("gpqa", "Z", "needs a label that is one of the choices"),
    ],
)
def test_a_label_that_cannot_be_met_is_an_error_and_not_a_wrong_answer(
    name: str, label: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        paid(name, Sample(r"</think>\boxed{1}", label))


@given(WORDS, LABELS)
def test_f1_is_dice_s_coefficient_of_the_bags_of_words(one: str, other: str) -> None:
    bags = [sorted(word for word in text.lower().split() if word not in ("a", "the")) for text in (one, other)]
    left = list(bags[1])
    shared = sum(word in left and left.remove(word) is None for word in bags[0])
    expected = 2 * shared / (len(bags[0]) + len(bags[1])) if shared else 0.0
    assert f1.grade(Sample(one, other))["reward"] == pytest.approx(expected)


def test_a_box_before_any_of_ours() -> None:
    config = RewardConfig(rm_type="boxed_f1")
    with GraderPool(config) as pool:
        graded = pool.grade([Sample(r"dog \boxed{cat}", "cat"), Sample("cat", "cat"), Sample(r"\boxed{cat", "cat")])
        assert [one.reward for one in graded] == [1.0, 0.0, 0.0]
        assert (pool.name, pool.version) == ("boxed_f1", get_grader(RewardConfig(rm_type="f1")).version)
    with pytest.raises(BadPlugin, match="no grader 'boxed_f2'"):
        get_grader(RewardConfig(rm_type="boxed_f2"))


@cases("name", ["dapo", "deepscaler", "gsm8k_strict"])
def test_no_box_before_those_that_look_for_a_mark(name: str) -> None:
    refused = rf"'boxed_{name}' would never give a reward: .*; set rm_type to {name}"
    with pytest.raises(BadPlugin, match=f"{refused}$"):
        require_findable_answer(f"boxed_{name}")
    check = row_check(RewardConfig())
    with pytest.raises(BadPlugin, match=f"^line 3: .*{refused}; or name another field"):
        check({"rm_type": f"boxed_{name}"}, "line 3")
    require_findable_answer(name)
    require_findable_answer("boxed_math")


def test_what_stands_in_a_whole_box_was_not_cut_off() -> None:
    assert not in_box(Sample(r"<think>\boxed{1}</think>\boxed{2} and", "2", finish_reason="length")).truncated
    assert in_box(Sample(r"<think>\boxed{1}", "2", finish_reason="length")).response == ""
