"""Formats of tool calls: parsing of calls from sampled tokens, and encoding of results into tokens.

Sampled tokens are decoded, but never tokenized again.

| `rollout.tool_call_format` | a call | its result |
|---|---|---|
| `template` | in the tokenizer's format, see `cairn.engines.agents.replies` | a message of the role `tool`, rendered \
by the chat template |
| `tags` | `<name>text</name>`, where the text is the tool's one required argument, or a JSON object of several | \
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
from cairn.engines.models.tokenizers import special_ids, text_after_reply
from cairn.storage.store.canonical import from_json

_MARK = "cairn-7f3a9c51-answer"
"""Placeholder for a reply of the policy when the template is analysed."""


REMEDY = "set rollout.tool_call_format=tags, or use a model whose template supports tools"


class BadTemplate(Exception):
    """The chat template cannot render results of tools."""


class CallFormat(Protocol):
    """A format of tool calls."""

    def calls(self, ids: np.ndarray) -> list[ToolCall]:
        """Return the calls in a reply of the policy, in order."""

    def results(self, ids: np.ndarray, results: Sequence[tuple[str, str]]) -> list[int]:
        """Return the tokens that follow a reply of the policy: the results, and the begin of the next reply.

        `results`: name of the tool and result of each call.
        """


class TemplateFormat:
    """The format of the model's chat template."""

    def __init__(self, tokenizer: Any, tools: Mapping[str, Tool], prompt: str) -> None:
        """Store the arguments. `prompt`: the episode's prompt, with the text that the template begins replies with."""
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        self._schemas = [tool.schema for tool in tools.values()]
        self._prompt = prompt

    def calls(self, ids: np.ndarray) -> list[ToolCall]:
        """Return the calls in a reply of the policy, in order."""
        ended = len(ids) and int(ids[-1]) in self._special
        text = self._tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        thinking = self._prompt.rstrip().endswith("<think>")
        return list(read_reply(text, self._tokenizer, self._schemas, thinking=thinking).calls)

    def results(self, ids: np.ndarray, results: Sequence[tuple[str, str]]) -> list[int]:
        """Return the tokens of the results and the begin of the next reply. Raises BadTemplate."""
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _MARK},
            *({"role": "tool", "name": name, "content": text} for name, text in results),
        ]
        try:
            rendered = self._rendered(messages, False)
            if rendered.count(_MARK) != 1:
                raise BadTemplate(_template_error("it does not write out what was said"))
            before = len(rendered.partition(_MARK)[0] + _MARK)
        except BadTemplate:  # such as gpt-oss's, which writes results only after their calls
            messages[1] = {"role": "assistant", "content": "", "tool_calls": [_as_message(c) for c in self.calls(ids)]}
            rendered, before = self._rendered(messages, False), len(self._rendered(messages[:2], False))
        begins = self._rendered(messages, True)
        if not begins.startswith(rendered):
            raise BadTemplate(_template_error("it does not write out what was said"))
        rest = rendered[before:] + self._begin(begins[len(rendered) :])
        if any(_json(text) not in rest and text not in rest for _, text in results if text.strip() == text):
            raise BadTemplate(_template_error("it leaves out tool results"))
        rest = text_after_reply(self._tokenizer, self._special, ids, rest)
        return list(self._tokenizer(rest, add_special_tokens=False, verbose=False)["input_ids"])

    def _begin(self, plain: str) -> str:
        """Return the text that begins replies, as in the prompt: data rows may have other template arguments."""
        place = self._prompt.rfind(plain) if plain else -1
        return self._prompt[place:] if place >= 0 else plain

    def _rendered(self, messages: list[dict[str, Any]], begins: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begins)
        except Exception as error:  # a template raises what it likes
            raise BadTemplate(_template_error(str(error))) from error
        return text


class TagFormat:
    """The format of tags named after the tools."""

    def __init__(self, tokenizer: Any, tools: Mapping[str, Tool]) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._begin = re.compile(rf"<({'|'.join(map(re.escape, tools))})>")

    def calls(self, ids: np.ndarray) -> list[ToolCall]:
        """Return the calls in a reply of the policy, in order."""
        if not self._tools:
            return []
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return [self._call(name, inner.strip()) for name, inner in self._tagged(text)]

    def results(self, ids: np.ndarray, results: Sequence[tuple[str, str]]) -> list[int]:
        """Return the tokens of the results."""
        text = "".join(f"\n<result>\n{result}\n</result>\n" for _, result in results)
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _tagged(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield each tool's name and the text between its tags."""
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
    """Return a text as templates write it that write results as JSON."""
    return json.dumps(text, ensure_ascii=False)


def _template_error(why: str) -> str:
    return f"the chat template cannot show the model tool results ({why}): {REMEDY}"


# Check whether a chat template's tool calls can be parsed: a call is rendered and parsed again.


_QUESTION = {"role": "user", "content": "2+2?"}
_CALL = ToolCall("cairn_add", {"a": 2})
_IDS = ("functions.cairn_add:0", "abcdefghi")
"""Ids of the rendered call: with the tool's name in it for Kimi K2, and of nine letters for Mistral."""


def _add(a: int) -> int:
    """Adds."""
    return a


_TOOL = Tool(_add, kind="pure", name=_CALL.name)


def unreadable_calls(tokenizer: Any) -> str | None:
    """Return why calls in the chat template's format cannot be parsed, or their results not rendered, and what to do.

    Returns None where both work. A template that renders no calls, but contains `<tool_call>`, is assumed to work.
    """
    written = list(_written(tokenizer))
    if not written:
        if "<tool_call>" in str(tokenizer.chat_template) or getattr(tokenizer, "response_template", None):
            return None
        return f"the chat template renders no tool calls: {REMEDY}"
    why = None
    for prompt, said in written:
        form = TemplateFormat(tokenizer, {_TOOL.name: _TOOL}, prompt)
        ids = np.asarray(tokenizer(said, add_special_tokens=False, verbose=False)["input_ids"])
        if form.calls(ids) != [_CALL]:
            why = why or f"the chat template renders calls in an unsupported format ({said[:200]!r}): {REMEDY}"
            continue
        try:
            form.results(ids, [(_CALL.name, "4")])
        except BadTemplate as error:
            return str(error)
        return None
    return why


def _written(tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Yield prompts, and the call that the template renders after each."""
    for id, arguments in product(_IDS, (_CALL.arguments, '{"a": 2}')):
        call = {"id": id, "type": "function", "function": {"name": _CALL.name, "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        options = {"tools": [_TOOL.schema], "tokenize": False}
        try:
            prompt, whole = (
                tokenizer.apply_chat_template(messages, add_generation_prompt=begins, **options)
                for messages, begins in (([_QUESTION], True), ([_QUESTION, answer], False))
            )
        except Exception:  # a template raises what it likes
            continue
        said = whole.removeprefix(prompt) if whole.startswith(prompt) else whole[_first_difference(prompt, whole) :]
        if _CALL.name in said:
            opened = prompt.rstrip().endswith("<think>") and "</think>" not in said
            yield prompt, f"{'</think>' if opened else ''}{said.rstrip()}"


def _first_difference(prompt: str, whole: str) -> int:
    """Return the index of the first difference between two texts, or of the begin of the tag that it is in."""
    place = next((place for place, both in enumerate(zip(prompt, whole, strict=False)) if both[0] != both[1]), 0)
    opened = whole.rfind("<", 0, place)
    return opened if opened > whole.rfind(">", 0, place) else place
