"""reasoning-gym's questions are the package's own, the same in every process, and graded by its own scorers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import reasoning_gym
from reasoning_gym.composite import CompositeConfig, CompositeDataset, DatasetSpec
from reasoning_gym.factory import create_curriculum
from simpleeval import InvalidExpression

from cairn.configs.errors import BadData
from cairn.configs.schema.data import RowFormat
from cairn.tasks.data.prompts import PromptData
from cairn.tasks.data.reasoning_gym import rows
from cairn.tasks.rewards.reasoning_gym import grade
from cairn.tasks.rewards.sample import Sample
from cairn.tasks.rewards.scorers import _formula, _literal

FORMAT = RowFormat(data_source_path="reasoning_gym", apply_chat_template=False)
BOTH = "datasets:\n  - {name: gcd, weight: 3, level: 1}\n  - {name: chain_sum, config: {max_terms: 3}}\n"


def test_the_questions_are_those_of_the_package_with_its_options():
    expected = reasoning_gym.create_dataset("chain_sum", size=20, seed=7, min_terms=2, max_terms=3)
    own = list(rows("chain_sum?size=20&seed=7&min_terms=2&max_terms=3"))
    assert [(row["prompt"], row["label"]) for row in own] == [(one["question"], one["answer"]) for one in expected]


def test_a_mixture_by_weights_is_the_composite_of_the_package(tmp_path: Path):
    (tmp_path / "both.yaml").write_text(f"size: 40\nseed: 3\n{BOTH}")
    curriculum = create_curriculum("gcd")
    curriculum.set_global_level(1)
    made = curriculum.generate_configuration()
    bounds = {name: value for name, value in vars(made).items() if name not in ("seed", "size")}
    specs = [DatasetSpec("gcd", 3, bounds), DatasetSpec("chain_sum", 1, {"max_terms": 3})]
    expected = CompositeDataset(CompositeConfig(40, 3, specs))
    own = list(rows(str(tmp_path / "both.yaml")))
    assert [row["prompt"] for row in own] == [expected[i]["question"] for i in range(40)]
    assert {row["metadata"]["reasoning_gym"]["generator"] for row in own} == {"gcd", "chain_sum"}


def test_train_and_heldout_share_no_question_whatever_their_seeds():
    found = {
        (part, seed): {row["prompt"] for row in rows(f"gcd?size=400&seed={seed}&part={part}&max_value=30")}
        for part in ("train", "heldout")
        for seed in (1, 2)
    }
    train, held_out = (found[part, 1] | found[part, 2] for part in ("train", "heldout"))
    assert not train & held_out
    assert found["train", 1] & found["train", 2]  # small numbers: seeds alone would not have kept them apart
    everything = {row["prompt"] for row in rows("gcd?size=400&seed=1&max_value=30")}
    assert found["train", 1] | found["heldout", 1] == everything
    assert 0.04 < len(found["heldout", 1]) / len(everything) < 0.16


@pytest.mark.slow
def test_every_process_gives_the_same_questions():
    names = ["zebra_puzzles", "letter_jumble", "family_relationships"]
    code = (
        "import json, reasoning_gym as r; "
        f"print(json.dumps([[e['question'] for e in r.create_dataset(n, size=3, seed=5)] for n in {names}]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment).stdout
    assert json.loads(other) == [[row["prompt"] for row in rows(f"{name}?size=3&seed=5")] for name in names]


@pytest.mark.parametrize(
    ("answer", "written"), [("boxed", r"so \boxed{{{}}}."), ("tag", "<answer> {} </answer>"), ("whole", " {}\n")]
)
def test_the_answer_stands_where_the_source_says(answer, written):
    for row in rows(f"prime_factorization?size=4&seed=2&answer={answer}"):
        right, wrong = written.format(row["label"]), written.format("not $ this")
        assert grade(Sample(right, row["label"], row["metadata"])) == {"reward": 1.0, "right": 1.0}
        assert grade(Sample(wrong, row["label"], row["metadata"]))["reward"] < 0.1
        assert grade(Sample(f"<think>{right}", row["label"], row["metadata"]))["reward"] == 0.0
        if answer != "whole":
            assert grade(Sample(row["label"], row["label"], row["metadata"]))["reward"] == 0.0


def test_a_part_of_the_score_is_not_right():
    (row,) = rows("countdown?size=1&seed=1&answer=whole")
    score = grade(Sample("1 + 1", row["label"], row["metadata"]))
    assert 0 < score["reward"] < 1
    assert score["right"] == 0.0


@pytest.mark.parametrize(
    "generator",
    [
        *("binary_matrix", "countdown", "n_queens", "polynomial_multiplication", "puzzle24", "simple_integration"),
        *("spiral_matrix", "string_insertion"),
    ],
)
def test_what_an_answer_says_is_not_executed(generator, tmp_path):
    """Scorers of these evaluate it, as Python or by sympy, which does."""
    entry = reasoning_gym.create_dataset(generator, size=1, seed=1)[0]
    metadata = {"reasoning_gym": {"generator": generator, "config": {}, "answer": "whole", "entry": entry}}
    for written in ("{}", "[{}]", "x + {}"):
        code = written.format(f"__import__('os').mkdir({str(tmp_path / 'was_here')!r})")
        assert grade(Sample(code, entry["answer"], metadata))["right"] == 0.0
    assert not any(tmp_path.iterdir())
    assert grade(Sample(entry["answer"], entry["answer"], metadata))["right"] == 1.0


@pytest.mark.parametrize(
    ("evaluated", "answer"),
    [
        (_literal, "[9 ** 9 ** 9 ** 9]"),
        (_literal, "'%1000000000d' % 1"),
        (_formula, "9**9**9**9"),
        (_formula, "(((9**99)**99)**99)**99"),
        (_formula, "sin(10**10**8)"),
        (_formula, "1/9**9**8"),
    ],
)
def test_what_would_fill_the_memory_is_not_computed(evaluated, answer):
    with pytest.raises((ValueError, InvalidExpression)):
        evaluated(answer)


def test_what_a_row_says_is_not_executed(tmp_path):
    code = f"__import__('os').mkdir({str(tmp_path / 'was_here')!r})"
    for generator, entry in (
        ("number_sorting", {"answer": code, "metadata": {}}),
        ("bitwise_arithmetic", {"answer": "0x1", "metadata": {"problem": code}}),
        ("simple_integration", {"answer": "x", "metadata": {"integrand": code, "variable": "x"}}),
    ):
        metadata = {"reasoning_gym": {"generator": generator, "config": {}, "answer": "whole", "entry": entry}}
        assert grade(Sample("[1]" if generator == "number_sorting" else "1", "", metadata))["right"] == 0.0
    assert not any(tmp_path.iterdir())


def test_rows_of_another_source_cannot_be_graded():
    with pytest.raises(ValueError, match="needs rows of the data source reasoning_gym"):
        grade(Sample("1", "1", {}))


def test_it_is_a_data_source_like_any_other(tokenizer):
    data = PromptData.open(FORMAT, "gcd?size=30&seed=1@[10:20]", tokenizer)
    reopened = PromptData.open(FORMAT, "gcd?size=30&seed=1", tokenizer)
    other = PromptData.open(FORMAT, "gcd?size=30&seed=2", tokenizer)
    assert data.row(0).prompt == reopened.row(10).prompt
    assert data.fingerprint == reopened.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("chain_sums?size=2", "has no generator 'chain_sums': did you mean chain_sum"),
        ("composite?size=2", "has no generator 'composite'"),
        ("gcd?size=none", "size is 'none' and seed 0: give whole numbers"),
        ("gcd?colour=2", r"refuses the options \(.*colour"),
        ("gcd?min_numbers=0", "refuses the options"),
        ("gcd?answer=hidden", "answer is 'hidden': use one of boxed, tag, whole"),
        ("gcd?part=test", "part is 'test': use one of all, train, heldout"),
        ("gcd?template=ask", "has no {question} in it"),
        ("gcd?level=x", "level is 'x': give a whole number"),
        ("acre?level=1", "acre has no curriculum: leave level out"),
        ("rubiks_cube?size=1", "scorer of rubiks_cube rejects the generator's own answer to question 1"),
        ("rearc?size=1", "scorer of rearc rejects"),
        ("game_of_life_halting?size=5&seed=3", "scorer of game_of_life_halting accepts any answer"),
        ("codeio?size=1", "codeio gives other questions every time"),
        ("word_ladder?size=1", "word_ladder gives other questions in every Python process: set PYTHONHASHSEED=0"),
    ],
)
def test_what_cannot_be_trained_on_is_named(path, says, tokenizer, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(BadData, match=says):
        PromptData.open(FORMAT, path, tokenizer)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- gcd", "does not hold options"),
        ("size: 3", "datasets is not a list of generators"),
        ("datasets: [{name: gcd}]\nsizes: 3", "there is no option 'sizes': use answer, datasets"),
        ("datasets: [{name: gcd, seed: 3}]", "a generator has no option 'seed'"),
        ("datasets: [{name: gcd, weight: 0}]", "the weight of gcd is 0: give a number above 0"),
        ("datasets: [{name: gcd}, {name: gcd}]", "a generator is named twice"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_file_that_says_something_else_is_named(tmp_path, text, says):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(BadData, match=says):
        list(rows(str(tmp_path / "plan.yaml")))
