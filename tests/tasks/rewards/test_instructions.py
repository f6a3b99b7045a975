"""What counts as following an instruction, where tests/tasks/evaluation/benchmarks/parity asks no other
implementation."""

import sys

import pytest

from cairn.tasks.rewards import ifeval
from cairn.tasks.rewards.ifeval import CHECKS, CannotCheck, follows
from cairn.tasks.rewards.sample import Sample


def row(*instructions: tuple[str, dict]) -> dict:
    return {
        "instruction_id_list": [name for name, _ in instructions],
        "kwargs": [arguments for _, arguments in instructions],
    }


@pytest.mark.parametrize(
    ("response", "count"),
    [
        ("One. Two! Three?", 3),
        ("Mr. Smith paid $3.50. He left.", 2),
        ("no full stop", 1),
        ("Dr. No, e.g. in the U.S., ran.", 1),
    ],
)
def test_sentences_are_counted_past_abbreviations_and_numbers(response, count):
    name = "length_constraints:number_sentences"
    assert follows(name, {"num_sentences": count, "relation": "at least"}, response)
    assert not follows(name, {"num_sentences": count, "relation": "less than"}, response)


@pytest.mark.parametrize(
    ("response", "count"), [("THIS is VERY LOUD", 3), ("STATE-OF-THE-ART", 1), ("I DON'T, 42", 2), ("Mixed Case", 0)]
)
def test_words_in_capitals_are_counted_with_hyphens_as_one(response, count):
    name = "change_case:capital_word_frequency"
    assert follows(name, {"capital_frequency": count, "capital_relation": "at least"}, response)
    assert follows(name, {"capital_frequency": count + 1, "capital_relation": "less than"}, response)


def test_all_instructions_of_the_data_set_are_known():
    assert len(CHECKS) == 25


def test_an_instruction_that_is_not_known_is_named():
    with pytest.raises(CannotCheck, match="'keywords:rhyme'"):
        ifeval.grade(Sample("text", None, row(("keywords:rhyme", {}))))
    with pytest.raises(CannotCheck, match="'keywords:existence' lacks its argument 'keywords'"):
        follows("keywords:existence", {"keywords": None}, "text")


def test_what_an_instruction_needs_is_named_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(CannotCheck, match=r"'language:response_language' needs .*'langdetect'.*cairn-rl\[ifeval\]"):
        follows("language:response_language", {"language": "en"}, "text")


def test_a_response_is_right_if_it_follows_all_and_what_it_follows_is_counted():
    rows = row(("punctuation:no_comma", {}), ("startend:quotation", {}), ("detectable_format:title", {}))
    found = ifeval.grade(Sample('*Sure*\n"<<A>> text"', None, rows))
    assert found == {
        "reward": 0.0,
        "strict": 0.0,
        "loose": 1.0,
        "instructions": 3,
        "followed_strict": 2,
        "followed_loose": 3,
    }
    assert ifeval.grade(Sample('<think>,</think>"<<A>>"', None, rows))["reward"] == 1.0


def test_a_row_without_instructions_is_no_row_of_ifeval():
    with pytest.raises(ValueError, match="one for one"):
        ifeval.grade(Sample("text", None, {"instruction_id_list": ["punctuation:no_comma"]}))
