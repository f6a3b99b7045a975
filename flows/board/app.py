"""The board's answers to a browser, and who may ask.

| request | answer | who |
|---|---|---|
| `GET /`, `GET /runs/RUN` | a page | everyone who reaches the address |
| `GET /data/…` | JSON, or 304 where the page has it already | the same |
| `POST /data/runs/RUN/ACTION` | JSON: what was done | who has the token, too |

Requests of pages of other sites are rejected, as by Prefect's server (`cairn.flows.orchestration.server_process`): by
their `Host`, `Origin` and `Sec-Fetch-Site`. No answer allows another origin to read it, and no page may frame these.
The token is sent in a header that only the page itself can set.
"""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cairn.configs.errors import BadInput, Failure
from cairn.flows.board.actions import ACTIONS
from cairn.flows.board.contents import RunContents
from cairn.flows.board.gpus import measure
from cairn.flows.board.reader import StoreReader
from cairn.flows.report.content import made
from cairn.flows.report.page import write_page
from cairn.flows.text import printable
from cairn.storage.ledger.layout import LAST_NUMBER
from cairn.storage.store.canonical import from_json

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_RUNS_IN_MEMORY = 12
"""Number of runs whose contents stay in memory."""


class Board:
    """The board of a store."""

    def __init__(self, reader: StoreReader, token: str, price: float | None = None) -> None:
        """`token`: without it nothing is changed. `price`: of a device for an hour."""
        self.reader = reader
        self._token, self._price = token, price
        self._contents: OrderedDict[str, RunContents] = OrderedDict()

    def app(self) -> Starlette:
        """Return the application."""
        data = "/data/runs/{run}"
        return Starlette(
            routes=[
                Route("/", self._all_page),
                Route("/favicon.ico", lambda request: Response(status_code=204)),
                Route("/runs/{run}", self._run_page),
                Route("/data/runs", self._all),
                Route("/data/machine", self._machine),
                Route(f"{data}/facts", self._facts),
                Route(f"{data}/curves", self._curves),
                Route(f"{data}/samples", self._samples),
                Route(f"{data}/tokens", self._tokens),
                Route(f"{data}/{{action}}", self._act, methods=["POST"]),
            ],
            middleware=[Middleware(GZipMiddleware, minimum_size=2000, compresslevel=3)],
            exception_handlers={HTTPException: _refuse, **dict.fromkeys(_STATUS, _refuse)},
        )

    # Functions without `async` run in a thread of their own.

    def _all_page(self, request: Request) -> Response:
        _prepare_tokenizers()
        parts = (("runs", "Runs"), ("curves", "Curves"))
        live = {"source": "/data/runs"}
        facts = {"name": "Cairn", "content": "runs.html", "live": live, "parts": parts, "made": made(self.reader.store)}
        return _page(facts)

    def _run_page(self, request: Request) -> Response:
        _, values, _ = self._run(request).values()
        _prepare_tokenizers()
        return _page(values)

    def _all(self, request: Request) -> Response:
        version, rows = self.reader.rows()
        answer = {"runs": rows, "store": self.reader.store.url, "priced": self._price is not None}
        return _answer(request, f"{version}", lambda: answer)

    def _machine(self, request: Request) -> Response:
        state = measure()
        return _answer(request, f"{hash(str(state))}", lambda: state)

    def _facts(self, request: Request) -> Response:
        contents = self._run(request)
        return _answer(request, contents.values()[0], contents.facts)

    def _curves(self, request: Request) -> Response:
        contents = self._run(request)
        return _answer(request, contents.values()[0], contents.curves)

    def _samples(self, request: Request) -> Response:
        contents = self._run(request)
        first, last = (_number(request, name) for name in ("first", "last"))
        tag, answer = contents.samples(first, last)
        return _answer(request, tag, lambda: answer)

    def _tokens(self, request: Request) -> Response:
        place = [_number(request, name) for name in ("iteration", "group_id", "sample_index")]
        if None in place:
            raise HTTPException(400, "name iteration, group_id and sample_index")
        return _json(self._run(request).tokens(*place))  # type: ignore[arg-type]

    async def _act(self, request: Request) -> Response:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme != "Bearer" or not secrets.compare_digest(token.encode(), self._token.encode()):
            raise HTTPException(401, "read-only: open the address with the token that the board printed at its start")
        action = ACTIONS.get(request.path_params["action"])
        if action is None:
            raise HTTPException(404, f"there is no action {request.path_params['action']!r}")
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise HTTPException(415, "a body must be declared as application/json")
        given = from_json(await request.body())
        if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
            raise HTTPException(400, "the body must be an object of texts")
        run = self._run(request).reader.run
        return _json(await run_in_threadpool(action, self.reader.store, run, given))

    def _run(self, request: Request) -> RunContents:
        name = request.path_params["run"]
        reader = self.reader.run(name)
        contents = self._contents.get(name)
        if contents is None or contents.ledger is not reader.ledger:  # the run may be another one of this name
            contents = RunContents(reader, self._price)
        self._contents[name] = contents
        self._contents.move_to_end(name)
        while len(self._contents) > _RUNS_IN_MEMORY:
            self._contents.popitem(last=False)
        return contents


@cache
def _prepare_tokenizers() -> None:
    """Begin to load what the texts of tokens need: it takes seconds."""

    def load() -> None:
        from transformers import AutoTokenizer  # noqa: F401

    threading.Thread(target=load, name="tokenizers", daemon=True).start()


def _page(values: Mapping[str, Any]) -> Response:
    return Response(b"".join(write_page(values, {})), media_type="text/html", headers=_HEADERS)


def _answer(request: Request, tag: str, make: Callable[[], Any]) -> Response:
    """Return JSON, or 304 where the browser has named the tag of what it has."""
    quoted = f'"{tag}"'
    if request.headers.get("if-none-match") == quoted:
        return Response(status_code=304, headers=_HEADERS | {"ETag": quoted})
    return _json(make(), {"ETag": quoted})


def _json(value: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    return JSONResponse(value, status, headers=_HEADERS | dict(headers or {}))


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) > 2**62:
        raise HTTPException(400, f"{name} is {text!r}, not a number")
    return int(text) if name in ("group_id", "sample_index") else min(int(text), LAST_NUMBER)


_STATUS = {FileNotFoundError: 404, LookupError: 404, BadInput: 400, ValueError: 400, Failure: 503}
"""Statuses of errors, by the nearest class."""


def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        status, text = error.status_code, error.detail
    else:
        status = next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)
        text = str(error.args[0] if type(error) is LookupError else error)
    if request.url.path.startswith("/data/"):
        return _json({"detail": text}, status=status)
    return Response(printable(f"{text}\n"), status, media_type="text/plain", headers=_HEADERS)
