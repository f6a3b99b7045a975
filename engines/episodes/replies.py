"""What a model says in a reply: what it thought, what it tells, and the tools that it calls, as its chat template has
them written.

| the template mentions | a call of a tool is |
|---|---|
| `<function=` (Qwen3-Coder) | `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` |
| `<arg_key>` (GLM) | `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>` |
| `[TOOL_CALLS]` (Mistral) | `[TOOL_CALLS]` and a list of `{"name": …, "arguments": {…}}` |
| `<|python_tag|>` (Llama) | `{"name": …, "parameters": {…}}` and nothing else |
| anything else (Hermes, Qwen) | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` |

Values of the first two are text where the tool's schema says so, and JSON otherwise. A call that cannot be read is left
in what the reply tells: whoever reads it sees what the model wrote.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_END_OF_THOUGHT = "</think>"
_BEGIN_OF_THOUGHT = "<think>"


@dataclass(frozen=True)
class ToolCall:
    """A tool that a model calls."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What a model says."""

    content: str
    """What it tells, without thoughts and calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    thoughts: str | None = None
    """None where it has none."""


Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of tools, as OpenAI has them: `{"type": "function", "function": {"name": …, "parameters": …}}`."""


def read_reply(text: str, template: str, tools: Tools = (), *, thinking: bool = False) -> Reply:
    """What a reply says.

    Args:
        text: without the token that ends it.
        template: the chat template.
        tools: that the model was told of; where there are none, nothing is a call.
        thinking: whether the prompt ends within a thought.
    """
    thoughts, told = _thoughts(text, thinking) if _END_OF_THOUGHT in template else (None, text)
    if not tools:
        return Reply(told, thoughts=thoughts)
    return replace(_reader(template)(told, _types(tools)), thoughts=thoughts)


def _thoughts(text: str, thinking: bool) -> tuple[str | None, str]:
    before, end, after = text.partition(_END_OF_THOUGHT)
    begins = before.lstrip().startswith(_BEGIN_OF_THOUGHT)
    if not end and not begins and not thinking:
        return None, text
    thought = before.lstrip().removeprefix(_BEGIN_OF_THOUGHT) if begins else before
    return thought.strip("\n"), after.lstrip("\n")


Types = Mapping[str, Mapping[str, str]]
"""Of each tool, the JSON types of its parameters."""


def _types(tools: Tools) -> Types:
    functions = [tool.get("function", tool) for tool in tools]
    return {
        str(function.get("name")): {
            name: str(schema.get("type", ""))
            for name, schema in ((function.get("parameters") or {}).get("properties") or {}).items()
        }
        for function in functions
    }


def _reader(template: str) -> Callable[[str, Types], Reply]:
    if "<function=" in template:
        return lambda text, types: _in_blocks(text, lambda block: _of_function(block, types))
    if "<arg_key>" in template:
        return lambda text, types: _in_blocks(text, lambda block: _of_arguments(block, types))
    if "[TOOL_CALLS]" in template:
        return lambda text, types: _listed(text)
    if "<|python_tag|>" in template:
        return lambda text, types: _bare(text)
    return lambda text, types: _in_blocks(text, lambda block: _of_object(_json(block), "arguments"))


def _in_blocks(text: str, read: Callable[[str], ToolCall | None]) -> Reply:
    calls = list[ToolCall]()

    def taken(block: "re.Match[str]") -> str:
        call = read(block.group(1))
        if call is None:
            return block.group(0)
        calls.append(call)
        return ""

    left = _BLOCK.sub(taken, text)
    return Reply(left.rstrip() if calls else text, tuple(calls))


def _of_function(block: str, types: Types) -> ToolCall | None:
    found = _FUNCTION.fullmatch(block)
    if found is None:
        return None
    name = found.group(1).strip()
    return ToolCall(name, {key: _value(value, name, key, types) for key, value in _PARAMETER.findall(found.group(2))})


def _of_arguments(block: str, types: Types) -> ToolCall | None:
    name = block.partition("<arg_key>")[0].strip()
    if not name or "\n" in name:
        return None
    pairs = [(key.strip(), value) for key, value in _ARGUMENT.findall(block)]
    return ToolCall(name, {key: _value(value, name, key, types) for key, value in pairs})


def _listed(text: str) -> Reply:
    content, marker, rest = text.partition("[TOOL_CALLS]")
    found = _json(rest) if marker else None
    calls = [_of_object(one, "arguments") for one in found] if isinstance(found, list) else []
    if not calls or None in calls:
        return Reply(text)
    return Reply(content.rstrip(), tuple(call for call in calls if call is not None))


def _bare(text: str) -> Reply:
    call = _of_object(_json(text.strip().removeprefix("<|python_tag|>")), "parameters")
    return Reply(text) if call is None else Reply("", (call,))


def _of_object(value: Any, arguments: str) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(arguments, {})
    given = _json(given) if isinstance(given, str) else given
    return ToolCall(value["name"], given) if isinstance(given, dict) else None


def _value(text: str, tool: str, name: str, types: Types) -> Any:
    if types.get(tool, {}).get(name) == "string":
        return text
    value = _json(text)
    return text if value is None and text.strip() != "null" else value


def _json(text: str) -> Any:
    """None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
