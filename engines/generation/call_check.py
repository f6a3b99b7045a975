"""Whether calls of tools can be read as a chat template writes them: a call is rendered and read again."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from cairn.engines.generation.call_formats import WAY_OUT, BadTemplate, TemplateFormat
from cairn.engines.replies import ToolCall
from cairn.engines.tools.tool import Tool

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
