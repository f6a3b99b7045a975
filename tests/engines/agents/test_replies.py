"""Calls of tools and thoughts are read as the models of the field write them."""

import json
from types import SimpleNamespace
from typing import Any

from cairn.engines.agents.replies import Reply, ToolCall, read_reply
from tests.engines.agents.generation.chat import chat_tokenizer
from tests.tables import cases

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
HERMES = "{{ '<tool_call>' }}"
AS_JSON = json.dumps({"name": "search", "arguments": {"query": "12", "k": 3}})


def read(text: str, template: str, *tools: Any, **how: bool) -> Reply:
    """As the tokenizer of a model with this chat template has it."""
    return read_reply(text, SimpleNamespace(chat_template=template), *tools, **how)


@cases(
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
        ("{{- '\"parameters\": ' }}", AS_JSON.replace("arguments", "parameters"), ""),
    ],
)
def test_a_call_is_read_as_the_template_tells_it(template: str, text: str, content: str) -> None:
    assert read(text, template, TOOLS) == Reply(content, (SEARCH,))
    assert read(text, template) == Reply(text), "a call of no tool"


GPT_OSS = "<|channel|>analysis<|message|> <|call|>"
DEEPSEEK = "<｜tool▁call▁begin｜>"
ARGUMENTS = json.dumps({"query": "12", "k": 3})


@cases(
    "text",
    [
        f" to=functions.search<|channel|>commentary json<|message|>{ARGUMENTS}",
        f"<|channel|>commentary to=functions.search <|constrain|>json<|message|>{ARGUMENTS}",
        f"<|channel|>commentary to=functions.search<|message|>{ARGUMENTS}<|call|>",
    ],
)
def test_messages_of_gpt_oss_are_told_apart_by_channel_and_recipient(text: str) -> None:
    thought = "<|channel|>analysis<|message|>well<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>Look.<|end|><|start|>assistant"
    assert read(thought + preamble + text, GPT_OSS, TOOLS) == Reply("Look.", (SEARCH,), "well")
    assert read(thought + text, GPT_OSS) == Reply(text, (), "well"), "a call of no tool"
    assert read(f"{thought}<|channel|>final<|message|>12", GPT_OSS, TOOLS) == Reply("12", (), "well")
    assert read(f"{thought}<|channel|>final", GPT_OSS, TOOLS) == Reply("<|channel|>final", (), "well")
    broken = text.replace("}", "")
    assert [call.name for call in read(broken, GPT_OSS, TOOLS).calls] == ["search"]
    assert read(broken, GPT_OSS, TOOLS).tool_calls == ()
    if "<|call|>" not in text:
        assert read(text, GPT_OSS, TOOLS, cut=True) == Reply(text)


@cases("space", ["", " "])  # models write one that the template does not
def test_calls_of_kimi_have_the_tool_in_their_ids(space: str) -> None:
    one = f"<|tool_call_begin|>functions.search:0{space}<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
    text = f"Look.<|tool_calls_section_begin|>{one}{one}<|tool_calls_section_end|>"
    assert read(text, "<|tool_call_begin|>", TOOLS) == Reply("Look.", (SEARCH, SEARCH))


def test_several_calls_of_deepseek_are_read_in_order() -> None:
    one = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
    text = f"Look.\n\n<｜tool▁calls▁begin｜>{one}\n{one}<｜tool▁calls▁end｜>"
    assert read(text, DEEPSEEK, TOOLS) == Reply("Look.", (SEARCH, SEARCH))
    broken = read(text.replace('"k": 3', '"k"', 1), DEEPSEEK, TOOLS)
    assert [call.unreadable is None for call in broken.calls] == [False, True]
    assert read("Look.", DEEPSEEK, TOOLS) == Reply("Look.")
    assert read(text[:-40], DEEPSEEK, TOOLS, cut=True).calls == (SEARCH,)


def test_several_calls_are_read_in_order_and_what_is_no_call_is_left() -> None:
    text = f"<tool_call>{AS_JSON}</tool_call><tool_call>{{broken</tool_call><tool_call>{AS_JSON}</tool_call>"
    result = read(text, HERMES, TOOLS)
    assert result.content == "<tool_call>{broken</tool_call>"
    assert result.tool_calls == (SEARCH, SEARCH)
    assert [call.unreadable is None for call in result.calls] == [True, False, True]
    assert read("[1, 2", "[TOOL_CALLS]", TOOLS) == Reply("[1, 2")


@cases(
    ("template", "text", "name", "why"),
    [
        (HERMES, "<tool_call>{'a': 1}</tool_call>", "", "what stands in <tool_call> is no JSON: "),
        (HERMES, f"<tool_call>{'[' * 50_000}</tool_call>", "", "what stands in <tool_call> is no JSON: "),
        (HERMES, "<tool_call>[]</tool_call>", "", "a call is an object with a name and arguments"),
        (
            HERMES,
            '<tool_call>{"name": "search", "arguments": null}</tool_call>',
            "search",
            "the arguments of search have",
        ),
        (
            HERMES,
            '<tool_call>{"name": "search", "arguments": "x"}</tool_call>',
            "search",
            "the arguments of search have",
        ),
        (
            "<function=",
            f"<tool_call><function=search><parameter=k>{'[' * 65 + ']' * 65}</parameter></function></tool_call>",
            "search",
            "the arguments of search are nested more than 64 deep",
        ),
        (
            "<arg_key>",
            "<tool_call>\n<arg_key>k</arg_key></tool_call>",
            "",
            "what stands in <tool_call> begins with",
        ),
        ("[TOOL_CALLS]", f"[TOOL_CALLS] {AS_JSON}", "", "what follows [TOOL_CALLS] is a JSON list of calls"),
        ("[TOOL_CALLS]", '[TOOL_CALLS] [{"name": 1}]', "", "a call is an object with a name and arguments"),
        ("<|python_tag|>", '{"name": "search", "parameters": 1}', "search", "the arguments of search have"),
    ],
)
def test_what_cannot_be_read_has_a_reason_and_is_told(template: str, text: str, name: str, why: str) -> None:
    result = read(text, template, TOOLS)
    assert (result.content, result.tool_calls) == (text, ())
    (call,) = result.calls
    assert call.name == name
    assert call.unreadable is not None
    assert call.unreadable.startswith(why)


@cases("template", ["<function=", "[TOOL_CALLS]", "<|python_tag|>", ""])
def test_blocks_are_read_whatever_the_template_says_of_calls(template: str) -> None:
    assert read(f"<tool_call>{AS_JSON}</tool_call>", template, TOOLS) == Reply("", (SEARCH,))
    function = "<tool_call><function=search><parameter=query>12</parameter><parameter=k>3</parameter></tool_call>"
    assert read(function, template, TOOLS) == Reply("", (SEARCH,))


def test_arguments_that_are_written_as_text_are_read() -> None:
    text = json.dumps({"name": "search", "arguments": json.dumps({"query": "12", "k": 3})})
    assert read(f"<tool_call>{text}</tool_call>", HERMES, TOOLS).calls == (SEARCH,)


def test_a_call_without_its_end_is_one_unless_the_reply_was_cut_off() -> None:
    """A stop string, or the token that ends a reply, may stand in its place."""
    text = f"Look.\n<tool_call>\n{AS_JSON}"
    assert read(text, HERMES, TOOLS) == Reply("Look.", (SEARCH,))
    assert read(text, HERMES, TOOLS, cut=True) == Reply(text)


@cases("template", ["", "{{ '</think>' }}"])
def test_calls_within_thoughts_are_none(template: str) -> None:
    call = f"<tool_call>{AS_JSON}</tool_call>"
    other = call.replace("12", "no")
    assert read(f"<think>{other}</think>{call}", template, TOOLS).calls == (SEARCH,)
    assert read(f"<think>{other}", template, TOOLS).calls == ()
    assert read(other, template, TOOLS, thinking=True).calls == ()
    assert read(f"{other}</think>{call}", template, TOOLS, thinking=True).calls == (SEARCH,)


def test_a_tokenizer_that_says_how_replies_are_read_is_asked() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.response_template = {
        "start_anchor": "assistant:",
        "fields": {
            "thinking": {"open": ["HM ", "<think>"], "close": " SO"},
            "tool_calls": {"open": "CALL ", "close": " END", "content": "json", "repeats": True},
        },
    }
    text = f"HM well SO CALL {AS_JSON} END"
    assert read_reply(text, tokenizer, TOOLS) == Reply("", (SEARCH,), "well")
    assert read_reply(text, tokenizer).calls == ()
    assert read_reply("well SO ", tokenizer, thinking=True) == Reply("", thoughts="well")
    assert read_reply("none", tokenizer, TOOLS) == Reply("none")
    broken = read_reply("CALL {1 END", tokenizer, TOOLS)
    assert broken.content == "CALL {1 END"
    assert (broken.calls[0].unreadable or "").startswith("the answer cannot be read")


@cases(
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
    assert read(text, "{{ '</think>' }}", thinking=thinking) == Reply(content, thoughts=thoughts)
    assert read(text, "", thinking=thinking) == Reply(text)
