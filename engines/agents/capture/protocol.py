"""From messages to tokens, so that what was sampled stays as it was sampled.

Where messages go on from a conversation that the session knows, its exact tokens stand, and what the chat template adds
for the new messages is found by rendering both. They stand only if the template tells the old messages, reply included,
in the same words as before. Where it tells them otherwise (thoughts left out, a note on the newest turn), or the client
has rewritten them, all is rendered, as a prompt that the world gave.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from cairn.engines.agents.replies import Reply, Tools, read_reply
from cairn.engines.agents.tools.errors import storable
from cairn.engines.models.tokenizers import after_reply, special_ids
from cairn.engines.types.trajectories import Segment, Trajectory
from cairn.engines.types.types import FinishReason, SamplingParams

# What a client is told.


class BadRequest(Exception):
    """What a client asks is not to be had. The session goes on."""

    def __init__(self, told: str, *, status: int = 400, code: str | None = None) -> None:
        """`told`: one sentence. `code`: as OpenAI's API has it."""
        super().__init__(told)
        self.status = status
        self.code = code


class SessionOver(BadRequest):
    """The session has ended."""

    def __init__(self) -> None:
        super().__init__("this session has ended: its sample has what it is made of", status=410, code="session_over")


# What went through a session: each request's tokens and those that the policy sampled after them, and the trajectories
# that they make.
#
# An exchange goes on from another one where its prompt begins with that one's tokens, exactly. From each exchange that
# none goes on from, the chain back to the first one is a trajectory, whose prompt is the first one's; what lies between
# two exchanges the world gave. An exchange that two chains share is trained on in the first of them.


@dataclass(eq=False)
class Exchange:
    """A request, and what the policy sampled."""

    prompt_ids: np.ndarray
    """[P] int32: all that it was sampled after."""
    segment: Segment
    parent: "Exchange | None"
    """That it goes on from."""
    ids: np.ndarray = field(init=False)
    """[P + T] int32."""
    lost: bool = False
    """Whether the client was gone when it was to be told."""
    retold: bool = False
    """Whether a later prompt has it in its history in other tokens."""

    def __post_init__(self) -> None:
        self.ids = np.concatenate([self.prompt_ids, self.segment.ids])

    def is_before(self, prompt_ids: np.ndarray) -> bool:
        """Whether a prompt begins with its tokens."""
        return len(prompt_ids) >= len(self.ids) and np.array_equal(prompt_ids[: len(self.ids)], self.ids)

    @property
    def chain(self) -> "list[Exchange]":
        """All that it goes on from, and itself."""
        found = [self]
        while found[-1].parent is not None:
            found.append(found[-1].parent)
        return found[::-1]


def parent_of(prompt_ids: np.ndarray, exchanges: Sequence[Exchange]) -> Exchange | None:
    """The exchange that a prompt goes on from: the longest of those that it begins with."""
    return max((one for one in exchanges if one.is_before(prompt_ids)), key=lambda one: len(one.ids), default=None)


def trajectories(exchanges: Sequence[Exchange]) -> list[Trajectory]:
    """Of exchanges in the order in which they ended. One that was lost, and that nobody went on from, is of none."""
    parents = {exchange.parent for exchange in exchanges}
    trained, found = set[Exchange](), list[Trajectory]()
    for last in exchanges:
        if last in parents or last.lost:
            continue
        chain, segments = last.chain, list[Segment]()
        end = len(chain[0].prompt_ids)
        for exchange in chain:
            if len(exchange.prompt_ids) > end:
                segments.append(Segment.given(exchange.prompt_ids[end:]))
            segments.append(_masked(exchange.segment) if exchange in trained else exchange.segment)
            end = len(exchange.ids)
        retold = sum(len(one.segment) for one in chain if one.retold and one not in trained)
        trained.update(chain)
        found.append(Trajectory(segments, chain[0].prompt_ids, retold=retold))
    return found


def _masked(segment: Segment) -> Segment:
    return replace(segment, loss_mask=np.zeros_like(segment.loss_mask))


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


# What a client asks, and what it is answered, in whatever words its API has for it.


@dataclass(frozen=True)
class Asked:
    """A request for the next reply of a conversation."""

    messages: tuple[Message, ...]
    tools: Tools = ()
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    model: str = "policy"
    stream: bool = False
    reports_log_probs: bool = False
    reports_usage: bool = False
    """Where it is streamed."""


@dataclass(frozen=True)
class Answer:
    """The reply."""

    id: str
    """The same where the sample's code runs again."""
    reply: Reply
    exchange: Exchange
    stopped_by: str | None = None
    """The string of the request that ended it."""
    tokens: tuple[str, ...] = ()
    """Each as text, where log-probs are asked for."""

    @property
    def is_cut(self) -> bool:
        """Whether it reached its longest length."""
        return self.exchange.segment.finish_reason == FinishReason.LENGTH

    def call_id(self, number: int) -> str:
        """Of its tool call `number`."""
        return f"call_{self.id}_{number}"


class Dialect(Protocol):
    """An API."""

    def read(self, body: Mapping[str, Any], params: SamplingParams, ignored: Collection[str]) -> Asked:
        """A request. Raises BadRequest for what is not to be had."""

    def whole(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        """The answer as one JSON object."""

    def events(self, asked: Asked, answer: Answer) -> list[str]:
        """The answer as server-sent events."""

    def error(self, told: str, status: int, code: str | None) -> dict[str, Any]:
        """What a client is told that asks for what is not to be had."""


# What a client may not ask, since tokens are drawn as the run says: log-probs are of one distribution, and no other is
# trained on.


_NOTHING: dict[str, tuple[Any, ...]] = {
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
"""Values besides null that change nothing, by the names of fields."""


def refuse_other_sampling(given: Mapping[str, Any], params: SamplingParams, ignored: Collection[str]) -> None:
    """Raise BadRequest where a request would have tokens drawn in another way than `params`. `ignored`: fields that
    the session looks over."""
    own: dict[str, tuple[Any, ...]] = {
        "temperature": (params.temperature,),
        "top_p": (params.top_p,),
        "top_k": (params.top_k,) if params.top_k > 0 else (-1, 0),
    }
    for name, allowed in {**own, **_NOTHING}.items():
        value = given.get(name)
        if value is None or value in allowed or name in ignored:
            continue
        runs = f", where the run has {own[name][0]}" if name in own else ""
        raise BadRequest(
            f"{name}={value!r} is not to be had{runs}, since tokens are drawn as the run says: leave it out, or let "
            f"the session look over it with cairn.capture(…, ignored={{{name!r}}})"
        )


def whole_number(given: Mapping[str, Any], *names: str) -> int | None:
    """The first of some fields that has a value: a positive whole number. Raises BadRequest for another value."""
    for name in names:
        value = given.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadRequest(f"{name}={value!r} has to be a whole number above 0")
            return value
    return None


def strings(given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A field that holds one string or several. Raises BadRequest for another value."""
    value = given.get(name)
    if value is None:
        return ()
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) and one for one in found):
        raise BadRequest(f"{name}={value!r} has to be a string or a list of strings")
    return tuple(found)
