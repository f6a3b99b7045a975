"""An HTTP proxy before an S3 server that does to requests what networks and busy stores do."""

import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Fault(StrEnum):
    """What happens to a request."""

    UNAVAILABLE = "unavailable"
    """503 without asking the server."""
    TRUNCATE = "truncate"
    """The server does it, but only half of the reply's body arrives."""
    LOSE_REPLY = "lose_reply"
    """The server does it, then the connection breaks."""
    DROP = "drop"
    """The connection breaks before the server sees the request."""


Plan = Callable[[str, str], Fault | None]
"""From method and path of a request to what happens to it."""


class FaultyProxy:
    """Listens on a free local port and forwards to `upstream`. Change its attributes at any time."""

    def __init__(self, upstream: str):
        self.plan: Plan = lambda method, path: None
        self.latency = 0.0
        """Seconds added to each request."""
        self.dropped_header: str | None = None
        """A request header that the server never sees: how a server behaves that does not know it."""
        self.happened: Counter[Fault] = Counter()
        """The witness: faults that did happen."""
        self.requests: Counter[str] = Counter()
        """Requests seen, by method."""
        self.lock = threading.Lock()
        self._upstream = urlsplit(upstream).netloc
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def forward(self) -> None:
                proxy._forward(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def _forward(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        time.sleep(self.latency)
        with self.lock:
            self.requests[request.command] += 1
            fault = self.plan(request.command, request.path)
            if fault is not None:
                self.happened[fault] += 1
        if fault is Fault.DROP:
            request.close_connection = True
            return
        if fault is Fault.UNAVAILABLE:
            self._reply(request, 503, {}, b"", b"")
            return
        connection = http.client.HTTPConnection(self._upstream, timeout=30)
        headers = {name: value for name, value in request.headers.items() if name.lower() != self.dropped_header}
        connection.request(request.command, request.path, body, headers)
        reply = connection.getresponse()
        content = reply.read()
        connection.close()
        if fault is Fault.LOSE_REPLY:
            request.close_connection = True
            return
        sent = content[: len(content) // 2] if fault is Fault.TRUNCATE else content
        self._reply(request, reply.status, dict(reply.getheaders()), content, sent)

    def _reply(
        self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes, sent: bytes
    ) -> None:
        request.send_response_only(status)
        if request.command != "HEAD":
            headers = {name: value for name, value in headers.items() if name.lower() != "content-length"}
            headers["Content-Length"] = str(len(content))
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "connection"):
                request.send_header(name, value)
        request.end_headers()
        request.wfile.write(sent)
        if sent != content:
            request.close_connection = True


@contextmanager
def faulty_proxy(upstream: str) -> Iterator[FaultyProxy]:
    """A proxy that lives as long as the block."""
    proxy = FaultyProxy(upstream)
    try:
        yield proxy
    finally:
        proxy.close()
