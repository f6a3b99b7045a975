"""Nothing that a policy writes takes longer to read than its length calls for."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.engines.agents.generation.call_formats import TagFormat
from cairn.engines.agents.replies import read_reply
from cairn.tasks.grading.outside.code import program_of
from cairn.tasks.rewards.ifeval import CHECKS
from tests.linear import shapes, too_slow
from tests.tables import cases

TAGS = ["tool_call", "function", "arg_key", "arg_value", "parameter", "think"]
PIECES = [*(f"<{tag}>" for tag in TAGS), *(f"</{tag}>" for tag in TAGS), "<function=f>", "<parameter=a>", "<parameter="]
PIECES += ["<arg_key>a</arg_key>", "<arg_key>a</arg_key><arg_value>", "<function=", " ", "\n", "a", "{", '{"a":', "[1,"]
PIECES += ["[TOOL_CALLS]", "<|python_tag|>", '"', "\\", "<|start|>assistant", "<|message|>", " to=f"]
PIECES += [f"<｜tool▁{tag}｜>" for tag in ("call▁begin", "sep", "call▁end")]
PIECES += [f"<|tool_call_{tag}|>" for tag in ("begin", "argument_begin", "end")]
INNER = [f"<{close}{tag}>" for tag in ("tool_call", "arg_key", "arg_value", "parameter") for close in ("", "/")]
PAIRED = [*INNER, "<parameter=a>", "a", "\n", " "]
PROPERTIES = {"a": {"type": "string"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}}]
TEMPLATES = [
    "",
    "<arg_key></think>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<｜tool▁call▁begin｜>",
    "<|tool_call_begin|>",
    "<|channel|><|call|>",
]
AROUND = [("", ""), ("<tool_call>f\n", "</tool_call>"), ("<tool_call><function=f>", "</function></tool_call>")]
OWN = {
    "<|tool_call_begin|>": ("<|tool_call_begin|>f", "a<|tool_call_end|>"),
    "<｜tool▁call▁begin｜>": ("<｜tool▁call▁begin｜>f", "a<｜tool▁call▁end｜>"),
    "<|channel|><|call|>": ("<|start|>assistant to=f", "<|message|>"),
}
"""What stands around a call, by the template that writes it so."""


def around(template: str, pairs: bool) -> Iterator[str]:
    for before, after in [*AROUND, *([OWN[template]] if template in OWN else [])]:
        for shape in shapes(PAIRED if pairs else PIECES, pairs):
            yield before + shape + after


@pytest.mark.parametrize(
    ("cut", "pairs"),
    [
        (False, False),
        pytest.param(True, False, marks=pytest.mark.proof),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
@cases("template", TEMPLATES)
def test_replies_are_read_in_linear_time(template: str, cut: bool, pairs: bool) -> None:
    tokenizer = SimpleNamespace(response_template=None, chat_template=template)
    assert too_slow(lambda text: read_reply(text, tokenizer, TOOLS, cut=cut), around(template, pairs)) == []


@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tags_are_read_in_linear_time(pairs: bool) -> None:
    tokenizer: Any = SimpleNamespace(decode=lambda ids, skip_special_tokens: ids)
    tool: Any = SimpleNamespace(parameters={"properties": {"x": {}}, "required": ["x"]})
    tags: Any = TagFormat(tokenizer, {"f": tool, "g": tool})
    assert too_slow(tags.calls, shapes(["<f>", "</f>", "<g>", "</g>", "a", "\n"], pairs)) == []


@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_programs_are_found_in_linear_time(pairs: bool) -> None:
    assert too_slow(program_of, shapes(["```", "`", "```python\n", "a", "\n", " "], pairs)) == []


INPUTS = {
    "keywords": ["ab"],
    "keyword": "ab",
    "forbidden_words": ["ab"],
    "letter": "a",
    "frequency": 1,
    "let_frequency": 1,
    "num_paragraphs": 2,
    "num_words": 3,
    "nth_paragraph": 1,
    "first_word": "a",
    "num_placeholders": 1,
    "postscript_marker": "P.P.S",
    "num_bullets": 1,
    "num_highlights": 1,
    "section_spliter": "Section",
    "num_sections": 1,
    "prompt_to_repeat": "a",
    "end_phrase": "a",
    "capital_frequency": 1,
    **dict.fromkeys(["relation", "let_relation", "capital_relation"], "at least"),
}
FOREIGN = ("language:", "change_case:english", "length_constraints:number_sentences")
"""Instructions that ask a library."""


@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=pytest.mark.slow)])
@cases("instruction", [name for name in CHECKS if not name.startswith(FOREIGN)])
def test_instructions_are_checked_in_linear_time(instruction: str, pairs: bool) -> None:
    pieces = ["a", "A-", "*", "* ", "******", "-", "[", "]", "<<", ">>", "```", "```json", '"', "\n", " ", "p."]
    pieces.append("Section 1")
    assert too_slow(lambda text: CHECKS[instruction](text, INPUTS), shapes(pieces, pairs)) == []
