"""How a model asks for calls of tools, and how it is told what they returned: from tokens to calls, and from results to
tokens. What was sampled is read and never tokenised again.

| `rollout.tool_call_format` | a call | its result |
|---|---|---|
| `template` | as the tokenizer's `response_schema` says, where the model has one; else `<tool_call>` with \
`{"name": …, "arguments": {…}}` (Hermes, Qwen) or `<function=name><parameter=x>…` (Qwen3-Coder, Qwen3.5) in it | a \
message of the role `tool`, as the chat template writes it |
| `tags` | `<name>text</name>`, the text being the tool's one required argument, or a JSON object of several | \
`<result>text</result>` |
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cairn.engines.tools.tool import Tool

_MARK = "cairn-7f3a9c51-answer"
"""Stands for an answer of the policy where the template is looked at."""
_DEEPEST = 64
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_THOUGHT, _ITS_END = "<think>", "</think>"


class BadTemplate(Exception):
    """The chat template does not say how results of tools are told."""


@dataclass(frozen=True)
class AskedCall:
    """What a model asks for."""

    name: str
    arguments: Any = None
    """An object, if it is right."""
    unreadable: str | None = None
    """Why it cannot be read; None where it can."""


class CallFormat(Protocol):
    """One of them."""

    def calls(self, ids: np.ndarray) -> list[AskedCall]:
        """What an answer of the policy asks for, in order."""

    def results(self, ids: np.ndarray, results: Sequence[tuple[str, str]]) -> list[int]:
        """The tokens that follow an answer of the policy: names of the tools that it asked for, with their results,
        and what the next answer begins after."""


class TemplateFormat:
    """That of the model's chat template."""

    def __init__(self, tokenizer: Any, tools: Mapping[str, Tool], prompt: str) -> None:
        """`prompt`: as the episode's data have it, with what the template begins answers with."""
        self._tokenizer = tokenizer
        self._tools = tools
        self._prompt = prompt

    def calls(self, ids: np.ndarray) -> list[AskedCall]:
        """See `CallFormat`. Those within thoughts are none."""
        ended = len(ids) and int(ids[-1]) in self._tokenizer.all_special_ids
        text = self._tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        if getattr(self._tokenizer, "response_schema", None):
            return self._by_schema(text)
        _, thought, answer = text.rpartition(_ITS_END)
        if not thought and _THOUGHT in text:
            return []
        return [self._hermes(inner) for inner in _HERMES.findall(answer)]

    def results(self, ids: np.ndarray, results: Sequence[tuple[str, str]]) -> list[int]:
        """See `CallFormat`. Raises BadTemplate."""
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _MARK},
            *({"role": "tool", "name": name, "content": text} for name, text in results),
        ]
        rendered, begins = self._rendered(messages, False), self._rendered(messages, True)
        if rendered.count(_MARK) != 1 or not begins.startswith(rendered):
            raise BadTemplate(_cannot("it does not write out what was said"))
        rest = rendered.partition(_MARK)[2] + self._begin(begins[len(rendered) :])
        if any(text not in rest for _, text in results if text.strip() == text):
            raise BadTemplate(_cannot("it leaves results of tools out"))
        last = self._tokenizer.decode(ids[-1:], skip_special_tokens=False) if len(ids) else ""
        if last and int(ids[-1]) in self._tokenizer.all_special_ids:
            rest = rest.removeprefix(last)  # the policy has ended its answer itself
        return list(self._tokenizer(rest, add_special_tokens=False, verbose=False)["input_ids"])

    def _begin(self, plain: str) -> str:
        """What answers begin after: of the prompt, since the data may give the template arguments."""
        place = self._prompt.rfind(plain) if plain else -1
        return self._prompt[place:] if place >= 0 else plain

    def _rendered(self, messages: list[dict[str, Any]], begins: bool) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begins)
        except (TemplateError, ValueError) as error:
            raise BadTemplate(_cannot(str(error))) from error
        return text

    def _by_schema(self, text: str) -> list[AskedCall]:
        try:
            found = self._tokenizer.parse_response(text).get("tool_calls") or []
        except Exception as error:  # whatever a model writes, it is no error of ours
            return [AskedCall("", unreadable=f"the answer cannot be read: {str(error)[:200]}")]
        return [self._checked(one.get("function", one) if isinstance(one, dict) else one) for one in found]

    def _hermes(self, inner: str) -> AskedCall:
        function = _FUNCTION.match(inner)
        if function is not None:
            name, body = function.groups()
            given = {key: self._value(name, key, value) for key, value in _PARAMETER.findall(body)}
            return AskedCall(name, given)
        try:
            call = json.loads(inner)
        except (ValueError, RecursionError) as error:
            return AskedCall("", unreadable=f"what stands in <tool_call> is no JSON: {str(error)[:200]}")
        return self._checked(call)

    def _checked(self, call: Any) -> AskedCall:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return AskedCall("", unreadable="a call is an object with a name and arguments")
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):  # it is told that they are no object
                arguments = json.loads(arguments)
        return _call(call["name"], arguments)

    def _value(self, name: str, key: str, text: str) -> Any:
        """Of a parameter that is written as it is: JSON, unless the tool takes a text."""
        tool = self._tools.get(name)
        if tool is None or tool.parameters["properties"].get(key, {}).get("type") == "string":
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text


class TagFormat:
    """Tags with the names of the tools."""

    def __init__(self, tokenizer: Any, tools: Mapping[str, Tool]) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        names = "|".join(map(re.escape, tools))
        self._calls = re.compile(rf"<({names})>(.*?)</\1>", re.DOTALL)

    def calls(self, ids: np.ndarray) -> list[AskedCall]:
        """See `CallFormat`."""
        if not self._tools:
            return []
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return [self._call(name, inner.strip()) for name, inner in self._calls.findall(text)]

    def results(self, ids: np.ndarray, results: Sequence[tuple[str, str]]) -> list[int]:
        """See `CallFormat`."""
        text = "".join(f"\n<result>\n{result}\n</result>\n" for _, result in results)
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _call(self, name: str, text: str) -> AskedCall:
        parameters = self._tools[name].parameters
        required = parameters.get("required", [])
        if len(required) <= 1:
            names = required or list(parameters["properties"])[:1]
            return AskedCall(name, {names[0]: text} if names and (text or required) else {})
        try:
            return _call(name, json.loads(text))
        except (ValueError, RecursionError) as error:
            return AskedCall(name, unreadable=f"{name} takes a JSON object with {', '.join(required)}: {error}")


def _call(name: str, arguments: Any) -> AskedCall:
    if isinstance(arguments, dict):
        if _is_deeper(arguments, _DEEPEST):
            return AskedCall(name, unreadable=f"the arguments of {name[:64]} are nested more than {_DEEPEST} deep")
        return AskedCall(name, arguments)
    return AskedCall(name, unreadable=f"the arguments of {name[:64]} have to be a JSON object")


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether objects and lists lie in one another more than so deep."""
    if not isinstance(value, dict | list):
        return False
    return depth == 0 or any(
        _is_deeper(one, depth - 1) for one in (value.values() if isinstance(value, dict) else value)
    )


def _cannot(why: str) -> str:
    return (
        f"the chat template cannot tell the model what tools returned ({why}): set rollout.tool_call_format=tags, or "
        "use a model whose template has tools"
    )
