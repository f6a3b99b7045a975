"""How a model asks for calls of tools, and how it is told what they returned: from tokens to calls, and from results to
tokens. What was sampled is read and never tokenised again.

| `rollout.tool_call_format` | a call | its result |
|---|---|---|
| `template` | as the tokenizer has it, see `cairn.engines.agents.replies` | a message of the role `tool`, as the chat \
template writes it |
| `tags` | `<name>text</name>`, the text being the tool's one required argument, or a JSON object of several | \
`<result>text</result>` |
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Protocol

import numpy as np

from cairn.engines.agents.replies import ToolCall, call_of, read_reply
from cairn.engines.agents.tools.tool import Tool
from cairn.engines.models.tokenizers import after_reply, special_ids
from cairn.storage.store.canonical import from_json

_MARK = "cairn-7f3a9c51-answer"
"""Stands for an answer of the policy where the template is looked at."""


WAY_OUT = "set rollout.tool_call_format=tags, or use a model whose template has tools"


class BadTemplate(Exception):
    """The chat template does not say how results of tools are told."""


class CallFormat(Protocol):
    """One of them."""

    def calls(self, ids: np.ndarray) -> list[ToolCall]:
        """What an answer of the policy asks for, in order."""

    def results(self, ids: np.ndarray, results: Sequence[tuple[str, str]]) -> list[int]:
        """The tokens that follow an answer of the policy: names of the tools that it asked for, with their results,
        and what the next answer begins after."""


class TemplateFormat:
    """That of the model's chat template."""

    def __init__(self, tokenizer: Any, tools: Mapping[str, Tool], prompt: str) -> None:
        """`prompt`: as the episode's data have it, with what the template begins answers with."""
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        self._schemas = [tool.schema for tool in tools.values()]
        self._prompt = prompt

    def calls(self, ids: np.ndarray) -> list[ToolCall]:
        """See `CallFormat`."""
        ended = len(ids) and int(ids[-1]) in self._special
        text = self._tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        thinking = self._prompt.rstrip().endswith("<think>")
        return list(read_reply(text, self._tokenizer, self._schemas, thinking=thinking).asked)

    def results(self, ids: np.ndarray, results: Sequence[tuple[str, str]]) -> list[int]:
        """See `CallFormat`. Raises BadTemplate."""
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _MARK},
            *({"role": "tool", "name": name, "content": text} for name, text in results),
        ]
        try:
            rendered = self._rendered(messages, False)
            if rendered.count(_MARK) != 1:
                raise BadTemplate(_cannot("it does not write out what was said"))
            before = len(rendered.partition(_MARK)[0] + _MARK)
        except BadTemplate:  # as that of gpt-oss, which writes results only behind the calls that they are of
            messages[1] = {"role": "assistant", "content": "", "tool_calls": [_as_message(c) for c in self.calls(ids)]}
            rendered, before = self._rendered(messages, False), len(self._rendered(messages[:2], False))
        begins = self._rendered(messages, True)
        if not begins.startswith(rendered):
            raise BadTemplate(_cannot("it does not write out what was said"))
        rest = rendered[before:] + self._begin(begins[len(rendered) :])
        if any(_json(text) not in rest and text not in rest for _, text in results if text.strip() == text):
            raise BadTemplate(_cannot("it leaves results of tools out"))
        rest = after_reply(self._tokenizer, self._special, ids, rest)
        return list(self._tokenizer(rest, add_special_tokens=False, verbose=False)["input_ids"])

    def _begin(self, plain: str) -> str:
        """What answers begin after: of the prompt, since the data may give the template arguments."""
        place = self._prompt.rfind(plain) if plain else -1
        return self._prompt[place:] if place >= 0 else plain

    def _rendered(self, messages: list[dict[str, Any]], begins: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begins)
        except Exception as error:  # a template raises what it likes
            raise BadTemplate(_cannot(str(error))) from error
        return text


class TagFormat:
    """Tags with the names of the tools."""

    def __init__(self, tokenizer: Any, tools: Mapping[str, Tool]) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._begin = re.compile(rf"<({'|'.join(map(re.escape, tools))})>")

    def calls(self, ids: np.ndarray) -> list[ToolCall]:
        """See `CallFormat`."""
        if not self._tools:
            return []
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return [self._call(name, inner.strip()) for name, inner in self._found(text)]

    def results(self, ids: np.ndarray, results: Sequence[tuple[str, str]]) -> list[int]:
        """See `CallFormat`."""
        text = "".join(f"\n<result>\n{result}\n</result>\n" for _, result in results)
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _found(self, text: str) -> Iterator[tuple[str, str]]:
        """Names, and what stands between their tags."""
        last = {name: text.rfind(f"</{name}>") for name in self._tools}
        position = 0
        while begin := self._begin.search(text, position):
            name, position = begin[1], begin.end()
            if position <= last[name]:
                end = text.find(f"</{name}>", position)
                yield name, text[position:end]
                position = end + len(name) + 3

    def _call(self, name: str, text: str) -> ToolCall:
        parameters = self._tools[name].parameters
        required = parameters.get("required", [])
        if len(required) <= 1:
            names = required or list(parameters["properties"])[:1]
            return ToolCall(name, {names[0]: text} if names and (text or required) else {})
        try:
            return call_of(name, from_json(text))
        except ValueError as error:
            return ToolCall(name, unreadable=f"{name} takes a JSON object with {', '.join(required)}: {error}")


def _as_message(call: ToolCall) -> dict[str, Any]:
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _json(text: str) -> str:
    """A text as templates write it that write results as JSON."""
    return json.dumps(text, ensure_ascii=False)


def _cannot(why: str) -> str:
    return f"the chat template cannot tell the model what tools returned ({why}): {WAY_OUT}"


# Whether calls of tools can be read as a chat template writes them: a call is rendered and read again.


_QUESTION = {"role": "user", "content": "2+2?"}
_CALL = ToolCall("cairn_add", {"a": 2})
_IDS = ("functions.cairn_add:0", "abcdefghi")
"""Ids of the rendered call: with the tool's name in it, as Kimi K2 has it, and the nine letters that Mistral wants."""


def _add(a: int) -> int:
    """Adds."""
    return a


_TOOL = Tool(_add, kind="pure", name=_CALL.name)


def unreadable_calls(tokenizer: Any) -> str | None:
    """Why calls that a model makes as its chat template writes them are not read, or their results not told, and what
    to do; None where both are. A template that only says that a call is a `<tool_call>` is believed."""
    written = list(_written(tokenizer))
    if not written:
        if "<tool_call>" in str(tokenizer.chat_template) or getattr(tokenizer, "response_schema", None):
            return None
        return f"the chat template writes no calls of tools: {WAY_OUT}"
    why = None
    for prompt, said in written:
        form = TemplateFormat(tokenizer, {_TOOL.name: _TOOL}, prompt)
        ids = np.asarray(tokenizer(said, add_special_tokens=False, verbose=False)["input_ids"])
        if form.calls(ids) != [_CALL]:
            why = why or f"the chat template writes calls in a way that is not read ({said[:200]!r}): {WAY_OUT}"
            continue
        try:
            form.results(ids, [(_CALL.name, "4")])
        except BadTemplate as error:
            return str(error)
        return None
    return why


def _written(tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Prompts, and the call that the template writes behind each."""
    for id, arguments in product(_IDS, (_CALL.arguments, '{"a": 2}')):
        call = {"id": id, "type": "function", "function": {"name": _CALL.name, "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        how = {"tools": [_TOOL.schema], "tokenize": False}
        try:
            prompt, whole = (
                tokenizer.apply_chat_template(messages, add_generation_prompt=asks, **how)
                for messages, asks in (([_QUESTION], True), ([_QUESTION, answer], False))
            )
        except Exception:  # a template raises what it likes
            continue
        said = whole.removeprefix(prompt) if whole.startswith(prompt) else whole[_parting(prompt, whole) :]
        if _CALL.name in said:
            opened = prompt.rstrip().endswith("<think>") and "</think>" not in said
            yield prompt, f"{'</think>' if opened else ''}{said.rstrip()}"


def _parting(prompt: str, whole: str) -> int:
    """Where two texts part, or where the tag begins within which they do."""
    place = next((place for place, both in enumerate(zip(prompt, whole, strict=False)) if both[0] != both[1]), 0)
    opened = whole.rfind("<", 0, place)
    return opened if opened > whole.rfind(">", 0, place) else place
