"""Client of a model behind a server, which returns the log-probs of tokens in the request.

| response of the server | consequence |
|---|---|
| nothing: no connection, or silence | retry, `ATTEMPTS` attempts in all; then EngineDied or EngineTimeout |
| 408, 429 or 5xx | the same number of attempts; then EngineError |
| anything else but 200 | TeacherUnusable at once |
| log-probs of other tokens, too few, or none | TeacherUnusable at once |

Sequences are requested concurrently, a bounded number at a time. The first failure ends all of them.
"""

import asyncio
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import numpy as np
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from cairn.engines.types.errors import EngineDied, EngineError, EngineTimeout, TeacherUnusable
from cairn.engines.types.types import TrainBatch

# Common parts of the wire formats.


ROUNDING = 1e-3
"""Greatest amount by which a log-prob may be above 0."""


class UnexpectedAnswer(ValueError):
    """An answer that does not fit the request. The message is the end of a sentence on the answer."""


TokenText = Callable[[int], str]
"""Function that returns the text of one token."""


@dataclass(frozen=True)
class Scored:
    """The end of a sequence as a server has scored it."""

    log_probs: list[Any]
    """Log-prob of each token."""
    ids: list[Any] | None
    """Id of each token, where the server reports ids."""
    texts: list[Any] | None
    """Text of each token, where the server reports no ids."""
    top: list[Any] | None = None
    """Pairs of log-prob and id of the most probable tokens in the place of each token, where requested."""

    def of(self, ids: Sequence[int], spell: TokenText) -> np.ndarray:
        """Return [T] float32 log-probs, if they are of exactly these tokens. Raises UnexpectedAnswer, which names the
        first token that differs or has no log-prob."""
        tokens = self.texts if self.ids is None else self.ids
        if tokens is None or not len(tokens) == len(self.log_probs) == len(ids):
            raise UnexpectedAnswer(f"has {len(self.log_probs)} log-probs for {len(ids)} tokens")
        for place, (token, reported) in enumerate(zip(ids, tokens, strict=True)):
            if self.ids is not None and reported != token:
                raise UnexpectedAnswer(
                    f"is for token {reported!r}, but token {token} was sent, at {place} of {len(ids)}"
                )
            # A token that is a part of a character has no text of its own, and servers spell it in many ways.
            if self.ids is None and reported != (text := spell(token)) and "\N{REPLACEMENT CHARACTER}" not in text:
                raise UnexpectedAnswer(
                    f"is for {reported!r}, but {text!r} was sent, at {place} of {len(ids)}: it has another tokenizer"
                )
        for place, value in enumerate(self.log_probs):
            if not isinstance(value, int | float) or not -math.inf < value <= ROUNDING:
                raise UnexpectedAnswer(f"has {value!r} instead of a log-prob, at {place} of {len(ids)}")
        return np.array(self.log_probs, np.float32)

    def top_of(self, k: int) -> np.ndarray:
        """Return [T, 2k] float32: log-probs of the k most probable tokens, and their ids. Raises UnexpectedAnswer where
        their number differs."""
        pairs = np.array([[entry[:2] for entry in entries] for entries in self.top or ()], np.float32)
        if pairs.shape != (len(self.log_probs), k, 2) or not (np.isfinite(pairs).all() and (pairs[..., 1] >= 0).all()):
            raise UnexpectedAnswer(f"has no log-probs of the {k} most probable tokens at each of {len(self.log_probs)}")
        return np.concatenate([pairs[..., 0], pairs[..., 1]], 1)


class Format(Protocol):
    """A wire format for requests of the log-probs of tokens."""

    path: str
    """Path of the request."""

    def body(self, name: str, ids: Sequence[int], scored: int, top_k: int = 0) -> dict[str, Any]:
        """Return the body of the request. `ids` are prompt and response. The log-probs of the last `scored` are
        requested, with the `top_k` most probable tokens in the place of each."""

    def read(self, answer: Any, num_tokens: int, scored: int) -> Scored:
        """Return what the answer says of the last `scored` of `num_tokens` tokens. Raises KeyError, IndexError,
        TypeError or ValueError where the answer has another format."""


# `/v1/completions` of OpenAI's interface, as vLLM and others serve it: `echo` with `logprobs` returns the log-prob of
# every token of the prompt, which is passed as token ids.
#
# One token has to be generated and is ignored. vLLM reports the ids of tokens (`return_tokens_as_token_ids`). Servers
# that do not know that option report their texts.


_ID = "token_id:"


class OpenAI:
    """Format of OpenAI's completions. Its chats accept no tokens."""

    path = "/v1/completions"

    def body(self, name: str, ids: Sequence[int], scored: int, top_k: int = 0) -> dict[str, Any]:
        """Return the body of the request; see `Format.body`. `top_k` is ignored."""
        return {
            "model": name,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "echo": True,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
        }

    def read(self, answer: Any, num_tokens: int, scored: int) -> Scored:
        """Return what the answer says; see `Format.read`."""
        entry = answer["choices"][0]["logprobs"]
        tokens, values = entry["tokens"], entry["token_logprobs"]
        if not num_tokens <= len(tokens) <= num_tokens + 1:
            return Scored(values, tokens, None)
        tokens, values = tokens[num_tokens - scored : num_tokens], values[num_tokens - scored : num_tokens]
        if all(str(token).startswith(_ID) for token in tokens):
            return Scored(values, [int(token.removeprefix(_ID)) for token in tokens], None)
        return Scored(values, None, tokens)


# SGLang's own `/generate`: `return_logprob` with `logprob_start_len` returns the log-prob and the id of every token of
# the input from there on, and `top_logprobs_num` those of the most probable tokens in its place.


class SGLang:
    """Format of SGLang's `/generate`. Nothing is generated: `max_new_tokens` is 0."""

    path = "/generate"

    def body(self, name: str, ids: Sequence[int], scored: int, top_k: int = 0) -> dict[str, Any]:
        """Return the body of the request; see `Format.body`. The first token from `logprob_start_len` on may have no
        log-prob, so that option names the token before."""
        return {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(ids) - scored - 1,
            **({"top_logprobs_num": top_k} if top_k else {}),
        }

    def read(self, answer: Any, num_tokens: int, scored: int) -> Scored:
        """Return what the answer says; see `Format.read`."""
        meta = answer["meta_info"]
        entries, top = meta["input_token_logprobs"][-scored:], meta.get("input_top_logprobs")
        return Scored([entry[0] for entry in entries], [entry[1] for entry in entries], None, top and top[-scored:])


ATTEMPTS = 5
"""Attempts at one sequence."""
KEY = "CAIRN_TEACHER_API_KEY"
"""Environment variable of the driver with the key of the server, if the server requires one."""
FORMATS: dict[str, Format] = {"sglang": SGLang(), "openai": OpenAI()}
_PASSING = (408, 429)
_CONNECT_TIMEOUT = 10.0
_LONGEST_WAIT = 10.0


class ServedModel:
    """A model behind a server."""

    def __init__(
        self, url: str, api: str, name: str, *, timeout: float, concurrency: int, spell: TokenText, top_k: int = 0
    ) -> None:
        """
        Args:
            url: URL of the server, with or without `/v1`.
            api: `sglang` or `openai`.
            name: name under which it serves the model.
            timeout: seconds for each attempt at one sequence.
            concurrency: sequences requested at a time.
            spell: returns the text of a token id, by the tokenizer that the model must have.
            top_k: number of most probable tokens that are requested as well as each token; `openai` returns none.
        """
        self._top_k = top_k
        self._url, self._format, self._name = url.rstrip("/").removesuffix("/v1"), FORMATS[api], name
        self._timeout, self._concurrency, self._spell = timeout, concurrency, spell
        self._lock = threading.Lock()
        self._runs: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._aborted = False

    def log_probs(self, batch: TrainBatch) -> list[np.ndarray]:
        """Return [R_i] float32 log-probs of each sequence's response tokens, or [R_i, 1 + 2 top_k], see
        `cairn.engines.training.log_probs`. Raises as the table of this module says, and CancelledError after
        `abort`."""
        return asyncio.run(self._abortable(batch))

    def abort(self) -> None:
        """End `log_probs` from another thread, whatever the server is doing."""
        with self._lock:
            self._aborted = True
            if self._runs is not None:
                loop, task = self._runs
                loop.call_soon_threadsafe(task.cancel)

    async def _abortable(self, batch: TrainBatch) -> list[np.ndarray]:
        task = asyncio.create_task(self._all(batch))
        with self._lock:
            self._runs = asyncio.get_running_loop(), task
            if self._aborted:
                task.cancel()
        try:
            return await task
        finally:
            with self._lock:
                self._runs = None

    async def _all(self, batch: TrainBatch) -> list[np.ndarray]:
        timeout = aiohttp.ClientTimeout(total=self._timeout, sock_connect=_CONNECT_TIMEOUT)
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        places = asyncio.Semaphore(self._concurrency)
        async with aiohttp.ClientSession(
            timeout=timeout, headers=headers, connector=aiohttp.TCPConnector(limit=0)
        ) as http:
            await self._require_served(http)

            async def one(ids: np.ndarray, scored: int) -> np.ndarray:
                if scored == 0:
                    return np.zeros(0, np.float32)
                async with places:
                    return await self._one(http, ids.tolist(), scored)

            pairs = zip(batch.input_ids, batch.response_lengths, strict=True)
            tasks = [asyncio.create_task(one(ids, scored)) for ids, scored in pairs]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _require_served(self, http: aiohttp.ClientSession) -> None:
        answer = await self._ask(http, "/v1/models", None)
        try:
            names = [model["id"] for model in answer["data"]]
        except (KeyError, TypeError):
            raise TeacherUnusable(f"/v1/models of {self._url} does not say which models it serves") from None
        if self._name not in names:
            raise TeacherUnusable(
                f"the server at {self._url} serves {', '.join(map(repr, names)) or 'no model'} and not {self._name!r}: "
                "set model.teacher_name"
            )

    async def _one(self, http: aiohttp.ClientSession, ids: list[int], scored: int) -> np.ndarray:
        path = self._format.path
        answer = await self._ask(http, path, self._format.body(self._name, ids, scored, self._top_k))
        try:
            read = self._format.read(answer, len(ids), scored)
            log_probs = read.of(ids[-scored:], self._spell)
            return np.column_stack([log_probs, read.top_of(self._top_k)]) if self._top_k else log_probs
        except UnexpectedAnswer as error:
            raise TeacherUnusable(f"the response of {path} of {self._url} {error}") from None
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise TeacherUnusable(
                f"the response of {path} of {self._url} has no log-probs of the tokens that were sent "
                f"({type(error).__name__}: {error})"
            ) from None

    async def _ask(self, http: aiohttp.ClientSession, path: str, body: dict[str, Any] | None) -> Any:
        """Return the JSON of the answer to a POST, or to a GET where there is no body."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(EngineError),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.2, max=_LONGEST_WAIT),
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                return await self._once(http, path, body)
        raise AssertionError("unreachable")

    async def _once(self, http: aiohttp.ClientSession, path: str, body: dict[str, Any] | None) -> Any:
        method, at = ("GET" if body is None else "POST"), f"{path} of {self._url}"
        try:
            async with http.request(method, f"{self._url}{path}", json=body, allow_redirects=False) as reply:
                if reply.status == 200:
                    return await reply.json(content_type=None)
                message = f"{at} responds with {reply.status}: {(await reply.text())[:500]}"
        except TimeoutError:
            raise EngineTimeout(f"{at} did not answer within {self._timeout:g} s (model.teacher_timeout)") from None
        except aiohttp.ClientError as error:
            raise EngineDied(f"{at}: {error}") from error
        except ValueError as error:  # it is not JSON
            raise TeacherUnusable(f"{at} does not respond in JSON: {error}") from None
        if reply.status in _PASSING or reply.status >= 500:
            raise EngineError(message)
        raise TeacherUnusable(message)
