"""Conversion of messages to tokens that never re-tokenizes what the policy sampled.

Where messages continue a conversation of the session, the prompt begins with the exact tokens of that conversation.
Rendering both with the chat template shows which text the new messages add. The old tokens are reused only if the
template renders the old messages, reply included, in the same words as before. Otherwise the whole conversation is
rendered again as a new prompt: the template left out thoughts or marks the newest turn, or the client rewrote messages.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from cairn.engines.agents.replies import Reply, Tools, read_reply
from cairn.engines.agents.tools.errors import storable
from cairn.engines.models.tokenizers import special_ids, text_after_reply
from cairn.engines.types.trajectories import Segment, Trajectory
from cairn.engines.types.types import FinishReason, SamplingParams

# Errors that clients receive.


class BadRequest(Exception):
    """The request is not supported. The session stays open."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        """Store the message `message`, one sentence, with the HTTP status and OpenAI's error code."""
        super().__init__(message)
        self.status = status
        self.code = code


class SessionOver(BadRequest):
    """The session has ended."""

    def __init__(self) -> None:
        super().__init__("this session has ended: its sample is complete", status=410, code="session_over")


# Exchanges and the trajectories that they form.
#
# An exchange continues an earlier one if its prompt begins exactly with the tokens of the earlier one. Each exchange
# that no other continues ends a trajectory: the chain back to the first exchange, with the prompt of the first one.
# Tokens between two exchanges come from the environment. An exchange that two chains share is trained on in the first.


@dataclass(eq=False)
class Exchange:
    """A request, and the segment that the policy sampled for it."""

    prompt_ids: np.ndarray
    """[P] int32: the tokens in front of the sampled ones."""
    segment: Segment
    parent: "Exchange | None"
    """The exchange that this one continues."""
    ids: np.ndarray = field(init=False)
    """[P + T] int32: prompt, then sampled tokens."""
    lost: bool = False
    """Whether the client had disconnected before the response was sent."""
    retold: bool = False
    """Whether a later prompt holds this exchange in its history, but in other tokens."""

    def __post_init__(self) -> None:
        self.ids = np.concatenate([self.prompt_ids, self.segment.ids])

    def is_before(self, prompt_ids: np.ndarray) -> bool:
        """Return whether a prompt begins with the tokens of this exchange."""
        return len(prompt_ids) >= len(self.ids) and np.array_equal(prompt_ids[: len(self.ids)], self.ids)

    @property
    def chain(self) -> "list[Exchange]":
        """The exchanges that this one continues, in order, and itself."""
        exchanges = [self]
        while exchanges[-1].parent is not None:
            exchanges.append(exchanges[-1].parent)
        return exchanges[::-1]


def parent_of(prompt_ids: np.ndarray, exchanges: Sequence[Exchange]) -> Exchange | None:
    """Return the longest exchange whose tokens a prompt begins with."""
    return max((one for one in exchanges if one.is_before(prompt_ids)), key=lambda one: len(one.ids), default=None)


def trajectories(exchanges: Sequence[Exchange]) -> list[Trajectory]:
    """Return the trajectories of exchanges, which are in the order in which they ended.

    A lost exchange that no other continues belongs to no trajectory.
    """
    parents = {exchange.parent for exchange in exchanges}
    trained, finished = set[Exchange](), list[Trajectory]()
    for last in exchanges:
        if last in parents or last.lost:
            continue
        chain, segments = last.chain, list[Segment]()
        end = len(chain[0].prompt_ids)
        for exchange in chain:
            if len(exchange.prompt_ids) > end:
                segments.append(Segment.given(exchange.prompt_ids[end:]))
            segment = exchange.segment
            if exchange in trained:
                segment = replace(segment, loss_mask=np.zeros_like(segment.loss_mask))
            segments.append(segment)
            end = len(exchange.ids)
        retold = sum(len(one.segment) for one in chain if one.retold and one not in trained)
        trained.update(chain)
        finished.append(Trajectory(segments, chain[0].prompt_ids, retold=retold))
    return finished


Message = dict[str, Any]
"""A message in OpenAI's format; its content is a string, the arguments of its tool calls are a mapping."""

_MARK = "\N{REFERENCE MARK}reply\N{REFERENCE MARK}"
"""Placeholder for the content of a reply."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and the reply to them."""

    messages: tuple[Message, ...]
    reply: Message
    tools: str
    """The tools, as JSON."""
    exchange: Exchange
    identity: tuple[str, ...]
    """Identity of each message and of the reply, for comparison with other messages."""

    def is_before(self, identity: Sequence[str]) -> bool:
        """Return whether messages begin with this conversation."""
        return tuple(identity[: len(self.identity)]) == self.identity


class ChatTemplate:
    """The chat template of a model. Raises BadRequest for messages that it cannot render."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        """Read the template of `tokenizer`. `arguments`: keyword arguments of the template."""
        self._tokenizer = tokenizer
        self._arguments = dict(arguments)
        self._source = str(tokenizer.chat_template or "")
        self._special = special_ids(tokenizer)

    def prompt(
        self, messages: Sequence[Message], tools: Tools, known: Sequence[Conversation]
    ) -> tuple[np.ndarray, tuple[Message, ...], list[Exchange]]:
        """Return the tokens of a prompt, its messages and the exchanges in its history.

        The returned messages contain the thoughts that the client left out.

        Args:
            known: earlier conversations of the session.
        """
        identity = tuple(map(_identity, messages))
        continued = (one for one in reversed(known) if one.is_before(identity))  # of two equal ones the later one
        before = sorted(continued, key=lambda one: len(one.identity), reverse=True)
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
        """Return the tokens of a text, [T] int32. A lone surrogate, which is not valid text, is escaped."""
        return np.asarray(self._tokenizer(storable(text), add_special_tokens=False)["input_ids"], np.int32)

    def text(self, ids: Sequence[int] | np.ndarray, *, skips: bool = False) -> str:
        """Return the text of tokens. `skips`: without special tokens."""
        tokens = [*map(int, ids)]
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        return text

    def said(self, segment: Segment) -> str:
        """Return the text that the policy sampled, without the token that ends it."""
        return self.text(segment.ids[: len(segment) - self._ended(segment)])

    def reply(self, prompt_ids: np.ndarray, said: str, tools: Tools, *, cut: bool) -> Reply:
        """Parse the content of a reply. `cut`: whether the reply reached its maximum length."""
        thinking = self.text(prompt_ids[-8:]).rstrip().endswith("<think>")
        return read_reply(said, self._tokenizer, tools, thinking=thinking, cut=cut)

    def _after(self, known: Conversation, tools: Tools, rendered: str) -> str | None:
        """Return the text that a prompt adds after a reply's tokens; None where the prompt does not continue them."""
        question = self._text(known.messages, tools)
        answered = self._text([*known.messages, known.reply], tools, opens=False)
        if not answered.startswith(question) or not rendered.startswith(answered):
            return None
        if (known.reply.get("reasoning_content") or "").strip() not in answered[len(question) :]:
            return None
        marked = self._text([*known.messages, {"role": "assistant", "content": _MARK}], tools, opens=False)
        _, mark, closing = marked.rpartition(_MARK)
        if not mark:
            return None
        segment, written = known.exchange.segment, closing + rendered[len(answered) :]
        return (
            text_after_reply(self._tokenizer, self._special, segment.ids, written) if self._ended(segment) else written
        )

    def _ended(self, segment: Segment) -> bool:
        """Return whether the last token is one that ends replies."""
        stopped = segment.finish_reason == FinishReason.STOP and len(segment) > 0
        return stopped and int(segment.ids[-1]) in self._special

    def _text(self, messages: Sequence[Message], tools: Tools, *, opens: bool = True) -> str:
        if not self._source:
            raise BadRequest("the model's tokenizer has no chat template: POST tokens to /generate")
        options: dict[str, Any] = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": opens}
        try:
            text: str = self._tokenizer.apply_chat_template(list(messages), **options, **self._arguments)
        except Exception as error:  # a template raises what it likes
            raise BadRequest(f"the model's chat template refuses these messages: {error}") from error
        return text


def conversation(messages: Sequence[Message], tools: Tools, reply: Reply, exchange: Exchange) -> Conversation:
    """Return the conversation that an exchange and its reply complete."""
    message: Message = {"role": "assistant", "content": reply.content}
    if reply.thoughts is not None:
        message["reasoning_content"] = reply.thoughts
    if reply.tool_calls:
        calls = [{"name": call.name, "arguments": call.arguments} for call in reply.tool_calls]
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    identity = tuple(map(_identity, (*messages, message)))
    return Conversation(tuple(messages), message, _json(tools), exchange, identity)


def _identity(message: Message) -> str:
    """Return the identity of a message, for comparison.

    Ids of calls, thoughts and the white space around a reply do not count: clients differ in how they write them.
    """
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


# A client's request and its response, independent of the API.


@dataclass(frozen=True)
class ChatRequest:
    """A request for the next reply of a conversation."""

    messages: tuple[Message, ...]
    tools: Tools = ()
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    model: str = "policy"
    stream: bool = False
    reports_log_probs: bool = False
    reports_usage: bool = False
    """Whether a streamed response reports token usage."""


@dataclass(frozen=True)
class ChatReply:
    """The reply to a request."""

    id: str
    """Id of the reply, the same when the sample's code runs again."""
    reply: Reply
    exchange: Exchange
    stopped_by: str | None = None
    """The stop string of the request that ended the reply."""
    tokens: tuple[str, ...] = ()
    """The text of each token, where the request wants log-probs."""

    @property
    def is_cut(self) -> bool:
        """Whether the reply reached its maximum length."""
        return self.exchange.segment.finish_reason == FinishReason.LENGTH

    def call_id(self, number: int) -> str:
        """Return the id of the reply's tool call `number`."""
        return f"call_{self.id}_{number}"


class Dialect(Protocol):
    """An HTTP API: how it writes requests, responses and errors."""

    def read(self, body: Mapping[str, Any], params: SamplingParams, ignored: Collection[str]) -> ChatRequest:
        """Parse the body of a request. Raises BadRequest for what is not supported."""

    def whole(self, request: ChatRequest, answer: ChatReply) -> dict[str, Any]:
        """Return the response as one JSON object."""

    def events(self, request: ChatRequest, answer: ChatReply) -> list[str]:
        """Return the response as server-sent events."""

    def error(self, message: str, status: int, code: str | None) -> dict[str, Any]:
        """Return the response to an unsupported request."""


# Clients cannot change the sampling of the run: log-probs refer to one distribution, and training uses no other.


_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "n": (1,),
    "best_of": (1,),
    "seed": (),
    "sampling_seed": (),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "response_format": ({"type": "text"},),
    "regex": (),
    "json_schema": (),
    "ebnf": (),
    "structural_tag": (),
    "custom_logit_processor": (),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "functions": ([],),
}
"""Values, besides null, with which a field changes nothing, by field name."""


def refuse_other_sampling(fields: Mapping[str, Any], params: SamplingParams, ignored: Collection[str]) -> None:
    """Raise BadRequest where a request wants other sampling than `params`. `ignored`: fields that are not checked."""
    own: dict[str, tuple[Any, ...]] = {
        "temperature": (params.temperature,),
        "top_p": (params.top_p,),
        "top_k": (params.top_k,) if params.top_k > 0 else (-1, 0),
    }
    for name, allowed in {**own, **_NEUTRAL_VALUES}.items():
        value = fields.get(name)
        if value is None or value in allowed or name in ignored:
            continue
        runs = f" (the run has {own[name][0]})" if name in own else ""
        raise BadRequest(
            f"{name}={value!r} is not supported{runs}, since the run sets how tokens are drawn: leave it out, or "
            f"ignore it with cairn.capture(…, ignored={{{name!r}}})"
        )


def checked_messages(
    body: Mapping[str, Any], tool_choice: str, params: SamplingParams, ignored: Collection[str]
) -> list[Any]:
    """Return the messages of a chat request. Raises BadRequest where it has none, or wants other sampling than
    `params`."""
    refuse_other_sampling(body, params, ignored)
    if tool_choice not in ("auto", "none") and "tool_choice" not in ignored:
        raise BadRequest(
            f"tool_choice={tool_choice!r} is not supported, since the run sets how tokens are drawn: use auto or none"
        )
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages has to be a list with a message")
    return messages


def whole_number(fields: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of some fields that has a value, a positive integer. Raises BadRequest for another value."""
    for name in names:
        value = fields.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadRequest(f"{name}={value!r} has to be a whole number above 0")
            return value
    return None


def strings(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the strings of a field that holds one string or several. Raises BadRequest for another value."""
    value = fields.get(name)
    if value is None:
        return ()
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(one, str) and one for one in values):
        raise BadRequest(f"{name}={value!r} has to be a string or a list of strings")
    return tuple(values)
