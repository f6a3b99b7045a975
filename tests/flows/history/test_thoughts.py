"""When a grader can do without the text with special tokens."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.configs.kinds import REWARD
from cairn.configs.schema.reward import RewardConfig
from cairn.flows.history.rescore import TAGS, can_form_tags
from cairn.tasks import rewards
from cairn.tasks.grading.graders import get_grader
from cairn.tasks.rewards import boxed
from cairn.tasks.rewards.grader import OUTSIDE

PIECES = st.lists(st.tuples(st.booleans(), st.sampled_from(["<", ">", "/", "</", "think", "k>", "<th", "a", *TAGS])))


@given(PIECES)
def test_tokens_that_make_no_tags_leave_the_text_with_those_that_it_has_without_them(pieces) -> None:
    special = [text for is_special, text in pieces if is_special]
    written = "".join(text for _, text in pieces)
    without = "".join(text for is_special, text in pieces if not is_special)
    if not can_form_tags(special):
        assert all(tag in without for tag in TAGS if tag in written)


@pytest.mark.parametrize("token", [*TAGS, "<", "<think", "k>", "think", "|</think>|", "a</thi", "nk>\n"])
def test_a_piece_of_a_tag_makes_one(token: str) -> None:
    assert can_form_tags(["<|end|>", token])


def test_usual_tokens_make_none() -> None:
    usual = ["<s>", "</s>", "<unk>", "<pad>", "[CLS]", "<|endoftext|>", "<|im_start|>", "<｜end▁of▁sentence｜>", ""]
    assert not can_form_tags(usual)


def test_graders_of_ours_read_texts_and_of_special_tokens_the_tags_alone() -> None:
    """What `sees_tokens` promises of them, by what their modules name."""
    assert (boxed._OPEN, boxed._CLOSE) == TAGS
    tokens = {"response_ids", "prompt_ids", "segments", "length", "asdict", "astuple"}
    folder = Path(rewards.__file__).parent
    names = {name for name in REWARD.built_in_names() if name not in OUTSIDE}
    assert {"exact_match", "math", "deepscaler"} <= names
    assert not any(get_grader(RewardConfig(rm_type=name)).sees_tokens for name in names)
    marked = set()
    for name in names | {"boxed", "notation"}:
        tree = ast.parse((folder / f"{name}.py").read_text("utf-8"))
        named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        named |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not named & tokens, name
        marked |= {name} if "response_with_special_tokens" in named else set()
    assert marked == {"boxed", "deepscaler"}
