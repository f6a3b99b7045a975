"""From messages to tokens, so that what was sampled stays as it was sampled.

Where messages go on from a conversation that the session knows, its exact tokens stand, and what the chat template adds
for the new messages is found by rendering both. They stand only if the template tells the old messages, reply included,
in the same words as before. Where it tells them otherwise (thoughts left out, a note on the newest turn), or the client
has rewritten them, all is rendered, as a prompt that the world gave.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cairn.engines.capture.errors import BadRequest
from cairn.engines.capture.exchanges import Exchange
from cairn.engines.replies import Reply, Tools, read_reply
from cairn.engines.tokenizers import after_reply, special_ids
from cairn.engines.tools.errors import storable
from cairn.engines.trajectories import Segment
from cairn.engines.types import FinishReason

Message = dict[str, Any]
"""As OpenAI's API has it, its content a string and the arguments of its tool calls a mapping."""

_MARK = "\N{REFERENCE MARK}reply\N{REFERENCE MARK}"
"""Stands for what a reply says."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and the reply that came to them."""

    messages: tuple[Message, ...]
    reply: Message
    tools: str
    """As JSON."""
    exchange: Exchange
    told: tuple[str, ...]
    """What tells its messages and the reply from others."""

    def is_before(self, told: Sequence[str]) -> bool:
        """Whether messages begin with it."""
        return tuple(told[: len(self.told)]) == self.told


class ChatTemplate:
    """Of a model. What it cannot render of what clients say is a BadRequest."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        """`arguments`: of the template."""
        self._tokenizer = tokenizer
        self._arguments = dict(arguments)
        self._source = str(tokenizer.chat_template or "")
        self._special = special_ids(tokenizer)

    def prompt(
        self, messages: Sequence[Message], tools: Tools, known: Sequence[Conversation]
    ) -> tuple[np.ndarray, tuple[Message, ...], list[Exchange]]:
        """The tokens of a prompt, its messages with the thoughts that their client left out, and the exchanges that it
        has in its history.

        Args:
            known: conversations of the session.
        """
        told = tuple(map(_told, messages))
        found = [one for one in reversed(known) if one.is_before(told)]  # of two that say the same the later one
        before = sorted(found, key=lambda one: len(one.told), reverse=True)
        whole = list(messages)
        for one in before:
            whole[len(one.messages)] = one.reply
        rendered = self._text(whole, tools)
        for one in before:
            after = self._after(one, tools, rendered) if one.tools == _json(tools) else None
            if after is not None:
                return np.concatenate([one.exchange.ids, self.ids(after)]), tuple(whole), [o.exchange for o in before]
        return self.ids(rendered), tuple(whole), [one.exchange for one in before]

    def ids(self, text: str) -> np.ndarray:
        """[T] int32. Half a surrogate pair, which is no text, is written as its escape."""
        return np.asarray(self._tokenizer(storable(text), add_special_tokens=False)["input_ids"], np.int32)

    def text(self, ids: Sequence[int] | np.ndarray, *, skips: bool = False) -> str:
        """Of tokens. `skips`: without special ones."""
        given = [*map(int, ids)]
        text: str = self._tokenizer.decode(given, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        return text

    def said(self, segment: Segment) -> str:
        """What the policy sampled, without the token that ends it."""
        return self.text(segment.ids[: len(segment) - self._ended(segment)])

    def reply(self, prompt_ids: np.ndarray, said: str, tools: Tools, *, cut: bool) -> Reply:
        """What a reply says. `cut`: whether it reached its longest length."""
        thinking = self.text(prompt_ids[-8:]).rstrip().endswith("<think>")
        return read_reply(said, self._tokenizer, tools, thinking=thinking, cut=cut)

    def _after(self, known: Conversation, tools: Tools, rendered: str) -> str | None:
        """What a prompt says after a reply's tokens; None where it does not go on from them."""
        asked = self._text(known.messages, tools)
        answered = self._text([*known.messages, known.reply], tools, opens=False)
        if not answered.startswith(asked) or not rendered.startswith(answered):
            return None
        if (known.reply.get("reasoning_content") or "").strip() not in answered[len(asked) :]:
            return None
        marked = self._text([*known.messages, {"role": "assistant", "content": _MARK}], tools, opens=False)
        _, found, closing = marked.rpartition(_MARK)
        if not found:
            return None
        segment, written = known.exchange.segment, closing + rendered[len(answered) :]
        return after_reply(self._tokenizer, self._special, segment.ids, written) if self._ended(segment) else written

    def _ended(self, segment: Segment) -> bool:
        """Whether its last token is one that ends replies."""
        stopped = segment.finish_reason == FinishReason.STOP and len(segment) > 0
        return stopped and int(segment.ids[-1]) in self._special

    def _text(self, messages: Sequence[Message], tools: Tools, *, opens: bool = True) -> str:
        if not self._source:
            raise BadRequest("the model's tokenizer has no chat template: POST tokens to /generate")
        how: dict[str, Any] = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": opens}
        try:
            text: str = self._tokenizer.apply_chat_template(list(messages), **how, **self._arguments)
        except Exception as error:  # a template raises what it likes
            raise BadRequest(f"the model's chat template refuses these messages: {error}") from error
        return text


def conversation(messages: Sequence[Message], tools: Tools, reply: Reply, exchange: Exchange) -> Conversation:
    """Of an exchange, whose reply the client is given."""
    message: Message = {"role": "assistant", "content": reply.content}
    if reply.thoughts is not None:
        message["reasoning_content"] = reply.thoughts
    if reply.tool_calls:
        calls = [{"name": call.name, "arguments": call.arguments} for call in reply.tool_calls]
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    told = tuple(map(_told, (*messages, message)))
    return Conversation(tuple(messages), message, _json(tools), exchange, told)


def _told(message: Message) -> str:
    """What tells a message from others, however its client wrote it down: ids of calls and thoughts do not, nor does
    the space around a reply."""
    content = message.get("content") or ""
    words: dict[str, Any] = {"role": message["role"], "content": content}
    if message["role"] == "assistant":
        words["content"] = content.strip()
    if message.get("name"):
        words["name"] = message["name"]
    if message.get("tool_calls"):
        words["calls"] = [call["function"] for call in message["tool_calls"]]
    return _json(words)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
