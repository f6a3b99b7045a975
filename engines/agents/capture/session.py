"""A captured session: it turns an agent's HTTP requests into calls of `ctx.sample`, and these into trajectories.

The agent may be any client of the APIs of `server.py`, in this process or in another one. The ids of its calls derive
from the content of its requests, so they do not depend on the order of concurrent requests. An agent that runs again
receives the recorded replies to the same requests.
"""

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np

from cairn.engines.agents.capture.protocol import (
    BadRequest,
    ChatReply,
    ChatRequest,
    ChatTemplate,
    Conversation,
    Exchange,
    SessionOver,
    conversation,
    parent_of,
    trajectories,
)
from cairn.engines.agents.episodes.context import Context
from cairn.engines.agents.episodes.recorder import EpisodeDiverged, Part
from cairn.engines.types.errors import RequestRefused
from cairn.engines.types.trajectories import Trajectory
from cairn.engines.types.types import FinishReason, SamplingParams

PATIENCE = 30.0
"""Seconds that an agent which runs again has to send the recorded requests before it sends another one."""


class Session:
    """The session of one agent, or of several that work together."""

    def __init__(self, ctx: Context, chat_template_kwargs: Mapping[str, Any], ignored: Collection[str]) -> None:
        self._ctx = ctx
        self._template_arguments = chat_template_kwargs
        self._template: ChatTemplate | None = None
        self.ignored = ignored
        """Fields of requests that are not checked."""
        self.exchanges = list[Exchange]()
        """All exchanges, in the order in which they ended."""
        self._conversations = list[Conversation]()
        self._texts = dict[str, np.ndarray]()
        self._request_counts = Counter[str]()
        self._part = Part()
        self._pending = dict[str, bool]()
        """Calls in flight, and whether each is recorded."""
        self._owner = asyncio.current_task()
        self._working = set["asyncio.Task[Any]"]()
        self._failure: BaseException | None = None
        self._over = False
        self.key = secrets.token_urlsafe(24)
        """Secret name of the session, in URLs and as an API key."""
        self.url = ""
        """`http://host:port/<session>`: the base URL for Anthropic's clients."""

    @property
    def base_url(self) -> str:
        """`http://host:port/<session>/v1`: the base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def api_key(self) -> str:
        """API key for clients that need one. It identifies the session where the URL does not name it."""
        return self.key

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that OpenAI's and Anthropic's clients read, for the process of an agent."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.api_key,
        }

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of the run."""
        return self._ctx.sampling

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template."""
        if self._template is None:
            self._template = ChatTemplate(self._ctx.tokenizer, self._template_arguments)
        return self._template

    def trajectories(self) -> list[Trajectory]:
        """Return the sample's trajectories, for `generate` to return. Raises ValueError where there was no request."""
        finished = trajectories(self.exchanges)
        if not finished:
            raise ValueError("the captured session received no request: pass session.base_url to the agent")
        return finished

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Register the running request; it is cancelled when the session ends. Raises SessionOver."""
        if self._over:
            raise SessionOver
        task = asyncio.current_task()
        assert task is not None
        self._working.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._over:
                raise SessionOver from None
            raise
        finally:
            self._working.discard(task)

    def count(self, request: ChatRequest) -> int:
        """Return the number of tokens of a conversation. Raises BadRequest."""
        return len(self.template.prompt(request.messages, request.tools, self._conversations)[0])

    def tokens(self, text: str) -> np.ndarray:
        """Return the tokens of a text. Where it begins with a known text, they begin with the exact tokens of that
        text."""
        known = max((one for one in self._texts if text.startswith(one)), key=len, default="")
        rest = self.template.ids(text[len(known) :])
        return np.concatenate([self._texts[known], rest]) if known else rest

    def remember(self, text: str, exchange: Exchange) -> None:
        """Store the text of an exchange's tokens, as the client received it."""
        self._texts[text] = exchange.ids

    async def converse(self, request: ChatRequest) -> ChatReply:
        """Return the next reply of a conversation. Raises BadRequest."""
        template = self.template
        prompt_ids, messages, history = template.prompt(request.messages, request.tools, self._conversations)
        exchange, id = await self.sample(prompt_ids, request.max_new_tokens, request.stop)
        for other in history:
            other.retold = other.retold or other not in exchange.chain
        said, stopped_by = until(template.said(exchange.segment), request.stop)
        cut = exchange.segment.finish_reason == FinishReason.LENGTH
        reply = template.reply(prompt_ids, said, request.tools, cut=cut)
        self._conversations.append(conversation(messages, request.tools, reply, exchange))
        tokens = tuple(template.text([id]) for id in exchange.segment.ids) if request.reports_log_probs else ()
        return ChatReply(id, reply, exchange, stopped_by, tokens)

    async def sample(
        self, prompt_ids: np.ndarray, max_new_tokens: int | None = None, stop: tuple[str, ...] = ()
    ) -> tuple[Exchange, str]:
        """Sample after a prompt; return the exchange and its id. Raises BadRequest."""
        words = f"{max_new_tokens}/{stop}/".encode() + prompt_ids.tobytes()
        name = hashlib.sha256(words).hexdigest()[:16]
        number = self._request_counts[name]
        self._request_counts[name] += 1
        try:
            with self._part.named(name) as call, self._in_flight(call):
                segment = await self._ctx.sample(prompt_ids, max_new_tokens=max_new_tokens, stop=stop)
        except RequestRefused as refused:
            message = "; ".join(refused.refused.values())
            raise BadRequest(message, code="context_length_exceeded") from None
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # it ends the sample, and the agent must not catch it
            self._fail(error)
            raise SessionOver from None
        exchange = Exchange(prompt_ids, segment, parent_of(prompt_ids, self.exchanges))
        self.exchanges.append(exchange)
        return exchange, f"{name}{number}"

    @contextmanager
    def _in_flight(self, call: str) -> Iterator[None]:
        """Mark a call as in flight.

        An unrecorded call waits until the agent has requested all recorded ones again. The session fails where that
        does not happen in time.
        """
        self._pending[call] = self._ctx.is_recorded(call)
        waits = self._ctx.replaying and not self._pending[call]
        timer = asyncio.get_running_loop().call_later(PATIENCE, self._check_replay, call) if waits else None
        try:
            yield
        finally:
            del self._pending[call]
            if timer is not None:
                timer.cancel()

    def _check_replay(self, call: str) -> None:
        if self._ctx.replaying and not any(self._pending.values()):
            message = f"the agent requests call {call} instead of the recorded calls, although it got the same replies"
            self._fail(EpisodeDiverged(message))

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            assert self._owner is not None
            self._owner.cancel()

    def _raise_failure(self, error: BaseException | None) -> None:
        if self._failure is not None and self._failure is not error:
            assert self._owner is not None
            self._owner.uncancel()
            raise self._failure from error

    async def _end(self) -> None:
        self._over = True
        working = [*self._working]
        for task in working:
            task.cancel()
        if working:
            await asyncio.wait(working)


def until(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Cut a text at the first of some stop strings; return it with that string."""
    first = min(((text.find(stop), stop) for stop in stops if stop in text), default=None)
    return (text, None) if first is None else (text[: first[0]], first[1])
