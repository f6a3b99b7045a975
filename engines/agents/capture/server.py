"""HTTP endpoints of captured sessions: one server for all open sessions, on the event loop that runs their samples.

The server listens while a session is open.

| path | API |
|---|---|
| `POST …/v1/chat/completions`, `GET …/v1/models` | OpenAI |
| `POST …/v1/messages`, `POST …/v1/messages/count_tokens` | Anthropic |
| `POST …/generate` | SGLang |
| `POST …/inference/v1/generate` | vLLM's token endpoint |

`…` names the session. It may be empty where the session's key is sent as `Authorization: Bearer` or `x-api-key`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import Context as Variables
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from cairn.engines.agents.capture import native
from cairn.engines.agents.capture.anthropic import Messages
from cairn.engines.agents.capture.openai import ChatCompletions
from cairn.engines.agents.capture.protocol import BadRequest, Dialect, Exchange
from cairn.engines.agents.capture.session import Session
from cairn.engines.agents.episodes.context import Context
from cairn.engines.agents.episodes.recorder import UncertainEffect
from cairn.engines.agents.tools.results import shortened
from cairn.engines.types.trajectories import SampleRequest
from cairn.storage.store.canonical import from_json

_MAX_REQUEST = 1 << 28
"""Maximum size of a request in bytes."""

Handler = Callable[[Session, dict[str, Any], web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(session: Session, host: str) -> AsyncIterator[str]:
    """Serve a session while the context is open; yield the URL that names it."""
    servers = _servers.setdefault(asyncio.get_running_loop(), {})
    server = servers.setdefault(host, _Server(host))
    server.sessions[session.key] = session
    try:
        yield f"{await server.address()}/{session.key}"
    finally:
        del server.sessions[session.key]
        if not server.sessions and servers.get(host) is server:
            del servers[host]
            await server.stop()


class _Server:
    """The server of one address."""

    def __init__(self, host: str) -> None:
        self.sessions: dict[str, Session] = {}
        self._host = host
        # An empty context: the tasks that the server starts do not belong to the sample that opened it.
        self._starting = Variables().run(asyncio.get_running_loop().create_task, self._start())

    async def address(self) -> str:
        """Return the server's URL as soon as it listens."""
        port, _ = await asyncio.shield(self._starting)
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"

    async def stop(self) -> None:
        """Close all connections."""
        _, runner = await asyncio.shield(self._starting)
        await runner.cleanup()

    async def _start(self) -> tuple[int, web.AppRunner]:
        app = web.Application(client_max_size=_MAX_REQUEST)
        openai, anthropic = ChatCompletions(), Messages()
        posts: tuple[tuple[str, Dialect, Handler], ...] = (
            ("/v1/chat/completions", openai, partial(_converse, openai)),
            ("/v1/messages", anthropic, partial(_converse, anthropic)),
            ("/v1/messages/count_tokens", anthropic, _count),
            ("/generate", openai, partial(_generate, native.generate)),
            ("/inference/v1/generate", openai, partial(_generate, native.generate_of_tokens)),
        )
        for before in ("", "/{session}"):
            app.router.add_get(f"{before}/v1/models", partial(_answer, self, openai, _models))
            for path, dialect, handler in posts:
                app.router.add_post(f"{before}{path}", partial(_answer, self, dialect, handler))
        app.router.add_route("*", "/{rest:.*}", partial(_unknown, openai))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, self._host, 0).start()
        return runner.addresses[0][1], runner


_API_ROOTS = ("v1", "generate", "inference")
"""First path components of URLs that name no session."""
_servers: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Server]]" = WeakKeyDictionary()


async def _answer(server: _Server, dialect: Dialect, handler: Handler, request: web.Request) -> web.StreamResponse:
    try:
        session = _session(server, request)
        body = await _body(request)
        async with session.serving():
            return await handler(session, body, request)
    except BadRequest as bad:
        return web.json_response(dialect.error(str(bad), bad.status, bad.code), status=bad.status)
    except web.HTTPException:
        raise
    except Exception as error:  # the request has another shape than its API: the client receives the reason
        message = f"the request cannot be read: {type(error).__name__}: {error}"
        return web.json_response(dialect.error(shortened(message, 1000), 400, None), status=400)


def _session(server: _Server, request: web.Request) -> Session:
    authorization = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    for key in (request.match_info.get("session"), authorization, request.headers.get("x-api-key")):
        if key and key in server.sessions:
            return server.sessions[key]
    raise BadRequest("neither the URL nor the API key names an open session", status=401, code="invalid_api_key")


async def _body(request: web.Request) -> dict[str, Any]:
    if request.method == "GET":
        return {}
    try:
        body = from_json(await request.read())
    except ValueError as error:
        raise BadRequest(f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the request has to be a JSON object")
    return body


async def _converse(
    dialect: Dialect, session: Session, body: dict[str, Any], request: web.Request
) -> web.StreamResponse:
    chat = dialect.read(body, session.sampling, session.ignored)
    answer = await session.converse(chat)
    if not chat.stream:
        return await _send(web.json_response(dialect.whole(chat, answer)), request, answer.exchange)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    return await _send(response, request, answer.exchange, dialect.events(chat, answer))


async def _send(
    response: web.StreamResponse, request: web.Request, exchange: Exchange, events: Sequence[str] = ()
) -> web.StreamResponse:
    """Send a response. Mark the exchange as lost where the client has disconnected."""
    try:
        await response.prepare(request)
        for event in events:
            await response.write(event.encode())
        await response.write_eof()
    except ConnectionError:
        exchange.lost = True
    if request.transport is None or request.transport.is_closing():
        exchange.lost = True
    return response


async def _models(session: Session, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "cairn"}
    return web.json_response({"object": "list", "data": [model]})


async def _count(session: Session, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    chat = Messages().read(body, session.sampling, session.ignored)
    return web.json_response({"input_tokens": session.count(chat)})


async def _generate(
    generate: Callable[[Session, dict[str, Any]], Awaitable[tuple[dict[str, Any], Exchange]]],
    session: Session,
    body: dict[str, Any],
    request: web.Request,
) -> web.StreamResponse:
    reply, exchange = await generate(session, body)
    return await _send(web.json_response(reply), request, exchange)


async def _unknown(dialect: Dialect, request: web.Request) -> web.StreamResponse:
    parts = request.path.strip("/").split("/")
    place = "/".join(parts if parts[0] in _API_ROOTS else parts[1:])  # without what may be a session's key
    served = "v1/chat/completions, v1/messages, v1/models, generate or inference/v1/generate"
    message = f"{request.method} …/{place} is not served: use {served}"
    return web.json_response(dialect.error(message, 404, None), status=404)


@asynccontextmanager
async def capture(
    ctx: Context,
    sample: SampleRequest,
    *,
    replayable: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    ignored: Collection[str] = (),
    host: str = "127.0.0.1",
) -> AsyncIterator[Session]:
    """Open a session for an agent; it ends with the context.

    Raises UncertainEffect where the sample was interrupted in or after its session, has to pass through it again, and
    the agent is not `replayable`.

    Args:
        replayable: whether the agent may run again. Its only effects are then its requests to the policy, and all that
            it does follows from the replies. The tools of another agent are not recorded, so it does not run twice.
        chat_template_kwargs: arguments of the chat template.
        ignored: fields of requests that are ignored where they want other sampling than the run's.
        host: address to listen on.
    """
    session = Session(ctx, chat_template_kwargs or {}, ignored)
    if ctx.replaying and not replayable:
        raise UncertainEffect(
            "its process was lost during or after a captured session, so what the agent did apart from its requests "
            "to the policy is unknown: set cairn.capture(…, replayable=True) if the agent may run again"
        )
    async with served(session, host) as session.url:
        try:
            yield session
        except BaseException as error:
            session._raise_failure(error)
            raise
        finally:
            await session._end()
    session._raise_failure(None)
