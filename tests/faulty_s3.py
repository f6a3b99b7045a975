"""An HTTP proxy before an S3 server that does to requests what networks and busy stores do.

In this process, with `faulty_proxy(upstream)`; or in one of its own, with `proxy_process(upstream)` or

    python -m tests.faulty_s3 http://127.0.0.1:9000 [--port N]

which prints its endpoint and ends with its standard input. Every proxy, whatever its faults, answers

    POST /-/faults {"latency": 0.005, "rates": {"unavailable": 0.05}, "outage": 30}

by taking over the settings that are named, and with the faults that have happened.
"""

import argparse
import http.client
import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_CONTROL = "/-/faults"


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
    HANG = "hang"
    """The connection stays open and nothing comes, neither the server's reply nor an end."""
    OUTAGE = "outage"
    """The same, as every request's fate for a while."""


Plan = Callable[[str, str], Fault | None]
"""From method and path of a request to what happens to it."""


def random_faults(rates: Mapping[str, float], seed: int = 0) -> Plan:
    """Each fault with its probability, independently of all else."""
    dice = random.Random(seed)
    faults, weights = [Fault(name) for name in rates], list(rates.values())
    return lambda method, path: dice.choices([*faults, None], [*weights, 1 - sum(weights)])[0]


class FaultyProxy:
    """Listens on a local port (0: any free one) and forwards to `upstream`. Change its attributes at any time."""

    def __init__(self, upstream: str, port: int = 0):
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
        self._outage_ends = float("-inf")
        self._closed = threading.Event()
        self._upstream = urlsplit(upstream).netloc
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path == _CONTROL:
                    happened = json.dumps(proxy.control(**json.loads(body))).encode()
                    proxy._reply(self, 200, {}, happened, happened)
                else:
                    proxy._forward(self, body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()

    def outage(self, seconds: float) -> None:
        """Break every connection from this moment on for a while; zero ends an outage."""
        self._outage_ends = time.monotonic() + seconds

    def control(
        self, latency: float | None = None, rates: Mapping[str, float] | None = None, outage: float | None = None
    ) -> dict[str, int]:
        """Apply these settings. Return the faults that have happened."""
        if latency is not None:
            self.latency = latency
        if rates is not None:
            self.plan = random_faults(rates)
        if outage is not None:
            self.outage(outage)
        with self.lock:
            return {str(fault): count for fault, count in self.happened.items()}

    def _forward(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        time.sleep(self.latency)
        with self.lock:
            self.requests[request.command] += 1
            fault = Fault.OUTAGE if time.monotonic() < self._outage_ends else self.plan(request.command, request.path)
            if fault is not None and fault is not Fault.TRUNCATE:
                self.happened[fault] += 1
        if fault in (Fault.DROP, Fault.OUTAGE):
            request.close_connection = True
            return
        if fault is Fault.HANG:
            self._closed.wait(60)
            request.close_connection = True
            return
        if fault is Fault.UNAVAILABLE:
            self._reply(request, 503, {}, b"", b"")
            return
        connection = http.client.HTTPConnection(self._upstream, timeout=30)
        headers = {name: value for name, value in request.headers.items() if name.lower() != self.dropped_header}
        try:
            connection.request(request.command, request.path, body, headers)
            reply = connection.getresponse()
            content = reply.read()
        except OSError:  # the server is away, as a victim of its own
            request.close_connection = True
            return
        finally:
            connection.close()
        if fault is Fault.LOSE_REPLY:
            request.close_connection = True
            return
        sent = content[: len(content) // 2] if fault is Fault.TRUNCATE else content
        if sent != content:  # a reply without a body cannot be cut
            with self.lock:
                self.happened[Fault.TRUNCATE] += 1
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


@dataclass(frozen=True)
class ProxyProcess:
    """A proxy in a process of its own, which can be stopped and killed like any other."""

    process: "subprocess.Popen[str]"
    endpoint: str

    def control(self, **settings: Any) -> dict[str, int]:
        """See `FaultyProxy.control`."""
        return control(self.endpoint, **settings)


def control(endpoint: str, **settings: Any) -> dict[str, int]:
    """Change the settings of the proxy at `endpoint`, from any process. See `FaultyProxy.control`."""
    request = urllib.request.Request(endpoint + _CONTROL, json.dumps(settings).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=60) as reply:
        happened: dict[str, int] = json.load(reply)
    return happened


@contextmanager
def proxy_process(upstream: str, port: int = 0) -> Iterator[ProxyProcess]:
    """A proxy in a process that lives at most as long as the block."""
    command = [sys.executable, "-m", "tests.faulty_s3", upstream, "--port", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        assert endpoint, "the proxy did not start"
        try:
            yield ProxyProcess(process, endpoint)
        finally:
            process.kill()


def main() -> None:
    """Run a proxy until standard input ends."""
    parser = argparse.ArgumentParser(description="An S3 proxy that injects faults.")
    parser.add_argument("upstream", help="the server's endpoint URL")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    proxy = FaultyProxy(args.upstream, args.port)
    print(proxy.endpoint, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
