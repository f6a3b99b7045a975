"""Parsing of a model's reply into thoughts, content and tool calls, in the format of its tokenizer.

| the tokenizer | format of a tool call |
|---|---|
| has a `response_template` | according to the template |
| its chat template contains `<arg_key>` (GLM) | \
`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>` |
| contains `[TOOL_CALLS]` (Mistral) | `[TOOL_CALLS]` and a list of `{"name": …, "arguments": {…}}` |
| contains `<|python_tag|>` or writes `"parameters": ` (Llama) | `{"name": …, "parameters": {…}}` and nothing else |
| contains `<｜tool▁call▁begin｜>` (DeepSeek), `<|tool_call_begin|>` (Kimi K2) | \
the tool's name and a JSON object between the tokens of `_SECTIONS` |
| contains `<|channel|>` and `<|call|>` (gpt-oss) | \
a message `to=functions.NAME` whose text is a JSON object; thoughts are those of the channel `analysis` |
| anything else, and where those find none (Hermes, Qwen) | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` |
| the same (Qwen3-Coder, Qwen3.5) | \
`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` |

Values of GLM and Qwen3-Coder are text where the tool's schema says so, and JSON otherwise. A call that cannot be parsed
has a reason, and stays in the content of the reply, so that a reader sees what the model wrote. Calls within thoughts
do not count.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cairn.storage.store.canonical import from_json

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_OPEN_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>)?", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_LISTED, _BARE, _BARE_KEY = "[TOOL_CALLS]", "<|python_tag|>", '"parameters": '
_SECTIONS = {
    "<｜tool▁call▁end｜>": re.compile(
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^<\n]+)(?:\n```json\n|<｜tool▁sep｜>)(.*?)(?:\n```)?<｜tool▁call▁end｜>\n?",
        re.DOTALL,
    ),
    "<|tool_call_end|>": re.compile(
        r"<\|tool_call_begin\|>(?:functions\.)?([^<:\n]++)(?::\d+)?\s*<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>",
        re.DOTALL,
    ),
}
_SECTION_BOUNDS = re.compile(r"<｜tool▁calls▁(?:begin|end)｜>|<\|tool_calls_section_(?:begin|end)\|>")
_MESSAGE = re.compile(r"(?P<head>.*?)<\|message\|>(?P<body>.*?)(?P<end><\|(?:end|call|return)\|>|$)", re.DOTALL)
_RECIPIENT = re.compile(r" to=(?:functions\.)?([^\s<]+)")
_DEEPEST = 64
_BEGIN_OF_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"


@dataclass(frozen=True)
class ToolCall:
    """A tool call of a model."""

    name: str
    """Name of the tool; may be empty where the call cannot be parsed."""
    arguments: dict[str, Any] = field(default_factory=dict)
    unreadable: str | None = None
    """Why the call cannot be parsed; None where it can."""


@dataclass(frozen=True)
class Reply:
    """A parsed reply of a model."""

    content: str
    """Text without thoughts and calls."""
    calls: tuple[ToolCall, ...] = ()
    """All calls in order, whether they can be parsed or not."""
    thoughts: str | None = None
    """Text of the thoughts; None where there are none."""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that can be parsed."""
        return tuple(call for call in self.calls if call.unreadable is None)


Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of tools in OpenAI's format: `{"type": "function", "function": {"name": …, "parameters": …}}`."""


def read_reply(text: str, tokenizer: Any, tools: Tools = (), *, thinking: bool = False, cut: bool = False) -> Reply:
    """Parse a reply.

    Args:
        text: text of the reply, without the token that ends it.
        tokenizer: the model's, for its chat template and its `response_template`.
        tools: tools in the model's prompt; without any, nothing counts as a call.
        thinking: whether the prompt ends within a thought.
        cut: whether the reply was cut off: a call without its end then does not count.
    """
    if getattr(tokenizer, "response_template", None):
        return _by_template(text, tokenizer, bool(tools), thinking)
    template = str(tokenizer.chat_template or "")
    if "<|channel|>" in template and "<|call|>" in template:
        return _in_messages(text, bool(tools), cut)
    thoughts, rest = _thoughts(text, thinking) if _END_OF_THOUGHT in template else (None, text)
    if not tools:
        return Reply(rest, thoughts=thoughts)
    passed, answer = _after_thoughts(rest, thinking and thoughts is None)
    reply = _read(answer, template, _types(tools), _BLOCK if cut else _OPEN_BLOCK)
    return Reply(passed + reply.content, reply.calls, thoughts)


def call_of(name: str, arguments: Any) -> ToolCall:
    """Return a call with the arguments that a model wrote."""
    if isinstance(arguments, str):
        read = _json(arguments)
        arguments = arguments if isinstance(read, _NoJson) else read
    if not isinstance(arguments, dict):
        return ToolCall(name, unreadable=f"the arguments of {name[:64]} have to be a JSON object")
    if _is_deeper(arguments, _DEEPEST):
        return ToolCall(name, unreadable=f"the arguments of {name[:64]} are nested more than {_DEEPEST} deep")
    return ToolCall(name, arguments)


def _is_deeper(value: Any, depth: int) -> bool:
    """Return whether objects and lists are nested more than `depth` deep."""
    if not isinstance(value, dict | list):
        return False
    return depth == 0 or any(
        _is_deeper(one, depth - 1) for one in (value.values() if isinstance(value, dict) else value)
    )


def _by_template(text: str, tokenizer: Any, has_tools: bool, thinking: bool) -> Reply:
    try:
        parsed = dict(tokenizer.parse_response(text, prefix=_BEGIN_OF_THOUGHT if thinking else ""))
        calls = [_of_object(one.get("function", one)) for one in parsed.get("tool_calls") or ()] if has_tools else []
    except Exception as error:  # a model may write anything
        return Reply(text, (_unreadable(f"the answer cannot be read: {str(error)[:200]}"),) if has_tools else ())
    thoughts, content = parsed.get("thinking", parsed.get("reasoning_content")), parsed.get("content")
    if any(call.unreadable for call in calls) or (content is None and not calls and thoughts is None):
        content = text
    return Reply(content or "", tuple(calls), thoughts)


def _thoughts(text: str, thinking: bool) -> tuple[str | None, str]:
    before, end, after = text.partition(_END_OF_THOUGHT)
    begins = before.lstrip().startswith(_BEGIN_OF_THOUGHT)
    if not end and not begins and not thinking:
        return None, text
    thought = before.lstrip().removeprefix(_BEGIN_OF_THOUGHT) if begins else before
    return thought.strip("\n"), after.lstrip("\n")


def _after_thoughts(text: str, thinking: bool) -> tuple[str, str]:
    """Split a text after thoughts that are unknown to the template; return both parts."""
    passed, end, answer = text.rpartition(_END_OF_THOUGHT)
    if not end and (thinking or _BEGIN_OF_THOUGHT in text):
        return text, ""
    return passed + end, answer


Types = Mapping[str, Mapping[str, str]]
"""JSON types of the parameters of each tool."""


def _types(tools: Tools) -> Types:
    functions = [tool.get("function", tool) for tool in tools]
    return {
        str(function.get("name")): {
            name: str(schema.get("type", ""))
            for name, schema in ((function.get("parameters") or {}).get("properties") or {}).items()
        }
        for function in functions
    }


def _read(text: str, template: str, types: Types, blocks: "re.Pattern[str]") -> Reply:
    if "<arg_key>" in template:
        return _in_blocks(text, blocks, lambda block: _of_function(block, types) or _of_arguments(block, types))
    reply = Reply(text)
    if _LISTED in template:
        reply = _listed(text)
    elif _BARE in template or _BARE_KEY in template:
        reply = _bare(text)
    else:
        for end, pattern in _SECTIONS.items():
            if end.replace("end", "begin") in template:
                reply = _in_sections(text, pattern, end)
    if reply.calls:
        return reply
    return _in_blocks(text, blocks, lambda block: _of_function(block, types) or _of_json(block))


def _in_blocks(text: str, blocks: "re.Pattern[str]", read: Callable[[str], ToolCall]) -> Reply:
    calls = list[ToolCall]()

    def left(block: "re.Match[str]") -> str:
        calls.append(read(block.group(1).strip()))
        return "" if calls[-1].unreadable is None else block.group(0)

    whole, rest = (text, "") if blocks is _OPEN_BLOCK else _through_last("</tool_call>", text)
    reply = Reply(blocks.sub(left, whole) + rest, tuple(calls))
    return replace(reply, content=reply.content.rstrip()) if reply.tool_calls else reply


def _in_sections(text: str, pattern: "re.Pattern[str]", end: str) -> Reply:
    whole, rest = _through_last(end, text)
    calls = tuple(call_of(name.strip(), arguments) for name, arguments in pattern.findall(whole))
    if not calls or any(call.unreadable for call in calls):
        return Reply(text, calls)
    return Reply(_SECTION_BOUNDS.sub("", pattern.sub("", whole) + rest).rstrip(), calls)


def _in_messages(text: str, has_tools: bool, cut: bool) -> Reply:
    """Parse the messages of gpt-oss; each names its recipient or its channel."""
    thoughts, content, calls = list[str](), list[str](), list[ToolCall]()
    for piece in text.split("<|start|>assistant"):
        message = _MESSAGE.match(piece)
        if message is None:
            content.append(piece)
            continue
        recipient = _RECIPIENT.search(message["head"])
        if recipient and has_tools and (message["end"] or not cut):
            calls.append(call_of(recipient[1], message["body"]))
            content += [piece] if calls[-1].unreadable else []
        elif recipient:
            content.append(piece)
        else:
            (thoughts if "<|channel|>analysis" in message["head"] else content).append(message["body"])
    return Reply("".join(content), tuple(calls), "\n".join(thoughts) if thoughts else None)


def _through_last(end: str, text: str) -> tuple[str, str]:
    """Split a text after the last `end`, so that patterns which need an `end` do not search the rest in vain."""
    place = text.rfind(end)
    place = 0 if place < 0 else place + len(end)
    return text[:place], text[place:]


def _of_function(block: str, types: Types) -> ToolCall | None:
    match = _FUNCTION.fullmatch(block)
    if match is None:
        return None
    name = match.group(1).strip()
    inner, _ = _through_last("</parameter>", match.group(2))
    return call_of(name, {key: _value(value, name, key, types) for key, value in _PARAMETER.findall(inner)})


def _of_arguments(block: str, types: Types) -> ToolCall:
    name = block.partition("<arg_key>")[0].strip()
    if not name or "\n" in name:
        return _unreadable("what stands in <tool_call> begins with the name of a tool")
    inner, _ = _through_last("</arg_value>", block)
    pairs = [(key.strip(), value) for key, value in _ARGUMENT.findall(inner)]
    return call_of(name, {key: _value(value, name, key, types) for key, value in pairs})


def _of_json(block: str) -> ToolCall:
    value = _json(block)
    if isinstance(value, _NoJson):
        return _unreadable(f"what stands in <tool_call> is no JSON: {value.why}")
    return _of_object(value)


def _listed(text: str) -> Reply:
    content, marker, rest = text.partition(_LISTED)
    if not marker:
        return Reply(text)
    parsed = _json(rest)
    if not isinstance(parsed, list):
        return Reply(text, (_unreadable(f"what follows {_LISTED} is a JSON list of calls"),))
    calls = tuple(map(_of_object, parsed))
    return Reply(text if any(call.unreadable for call in calls) else content.rstrip(), calls)


def _bare(text: str) -> Reply:
    parsed = _json(text.strip().removeprefix(_BARE))
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        return Reply(text)
    call = _of_object(parsed, "parameters")
    return Reply("" if call.unreadable is None else text, (call,))


def _of_object(value: Any, arguments: str = "arguments") -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _unreadable(f"a call is an object with a name and {arguments}")
    return call_of(value["name"], value.get(arguments, {}))


def _unreadable(why: str) -> ToolCall:
    return ToolCall("", unreadable=why)


def _value(text: str, tool: str, name: str, types: Types) -> Any:
    if types.get(tool, {}).get(name) == "string":
        return text
    value = _json(text)
    return text if isinstance(value, _NoJson) else value


@dataclass(frozen=True)
class _NoJson:
    why: str


def _json(text: str) -> Any:
    """Parse JSON; return a `_NoJson` where that fails."""
    try:
        return from_json(text)
    except ValueError as error:
        return _NoJson(str(error)[:200])
