"""Calls of tools and thoughts are read as the models of the field write them."""

import json

import pytest

from cairn.engines.episodes.replies import Reply, ToolCall, read_reply

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {"properties": {"query": {"type": "string"}, "k": {"type": "integer"}}},
        },
    }
]
SEARCH = ToolCall("search", {"query": "12", "k": 3})
AS_JSON = json.dumps({"name": "search", "arguments": {"query": "12", "k": 3}})


@pytest.mark.parametrize(
    ("template", "text", "content"),
    [
        ("<tool_call>", f"Look.\n<tool_call>\n{AS_JSON}\n</tool_call>", "Look."),
        (
            "<tool_call>\n<function=",
            "Look.\n<tool_call>\n<function=search>\n<parameter=query>\n12\n</parameter>\n<parameter=k>\n3\n</parameter>\n"
            "</function>\n</tool_call>",
            "Look.",
        ),
        (
            "<tool_call>{name}<arg_key>",
            "Look.\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>12</arg_value>\n<arg_key>k</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>",
            "Look.",
        ),
        ("[TOOL_CALLS]", f"Look. [TOOL_CALLS] [{AS_JSON}]", "Look."),
        ("<|python_tag|>", AS_JSON.replace("arguments", "parameters"), ""),
    ],
)
def test_a_call_is_read_as_the_template_tells_it(template: str, text: str, content: str) -> None:
    assert read_reply(text, template, TOOLS) == Reply(content, (SEARCH,))
    assert read_reply(text, template) == Reply(text), "a call of no tool"


def test_several_calls_are_read_in_order_and_what_is_no_call_is_left() -> None:
    text = f"<tool_call>{AS_JSON}</tool_call><tool_call>{{broken</tool_call><tool_call>{AS_JSON}</tool_call>"
    assert read_reply(text, "", TOOLS) == Reply("<tool_call>{broken</tool_call>", (SEARCH, SEARCH))
    assert read_reply("[1, 2", "[TOOL_CALLS]", TOOLS) == Reply("[1, 2")
    assert read_reply("<tool_call>[]</tool_call>", "", TOOLS).tool_calls == ()


@pytest.mark.parametrize(
    ("text", "thinking", "thoughts", "content"),
    [
        ("<think>\nHm.\n</think>\n\nSo.", False, "Hm.", "So."),
        ("Hm.\n</think>\n\nSo.", True, "Hm.", "So."),
        ("Hm", True, "Hm", ""),
        ("<think>Hm", False, "Hm", ""),
        ("So.", False, None, "So."),
    ],
)
def test_thoughts_are_told_apart(text: str, thinking: bool, thoughts: str | None, content: str) -> None:
    assert read_reply(text, "{{ '</think>' }}", thinking=thinking) == Reply(content, thoughts=thoughts)
    assert read_reply(text, "", thinking=thinking) == Reply(text)
