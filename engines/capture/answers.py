"""What a client asks, and what it is answered, in whatever words its API has for it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cairn.engines.capture.conversations import Message
from cairn.engines.capture.exchanges import Exchange
from cairn.engines.replies import Reply, Tools
from cairn.engines.types import FinishReason, SamplingParams


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
