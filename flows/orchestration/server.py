"""The embedded Prefect server: a child process of the driver that stores its history in a folder.

A driver wraps its flows in `prefect_api(home)`. An API that the user configured, by `PREFECT_API_URL` or by a Prefect
profile, always takes precedence. Only without one is a server started, once for each process and home:

    <home>/prefect.db    SQLite, retained between runs: every server of this home shows the same history
    <home>/server.log    output of the servers of this home
    <home>/start.lock    locked while a server migrates the database

Prefect can start a server by itself, but that one gives up after 20 s, serves no UI, stores its history in the user's
home folder and prints tracebacks when it ends. The server of this module

- imports its modules while the driver imports its own, and neither serves nor opens the database until it is signalled;
- receives a socket that is already bound, so no port can be lost meanwhile, and requests wait in the backlog until the
  server is up;
- polls its parent's process id, so it exits within seconds however the driver died, SIGKILL included;
- runs in its own session, so Ctrl-C reaches only the driver, which can still report its last state;
- is restarted if it dies: the driver holds the socket, so requests wait in its backlog meanwhile, and Prefect's client
  retries interrupted ones.

Several drivers in one folder have a server each, on one database: none loses its API when another driver ends.
Measured, with eight no-op steps an iteration, on two cores (see also `bench/orchestration.py`):

- SQLite transactions that begin DEFERRED fail at once when another connection wrote meanwhile; the API responds with
  503 and Prefect's client sleeps about 2 s. On a slow machine this happened in every iteration. IMMEDIATE transactions
  wait a few ms instead.
- For a listening socket created without `IPPROTO_TCP`, asyncio sets no TCP_NODELAY, and each request waits 40 ms
  longer.
- Task events recorded in batches instead of one by one: 260 -> 150 ms of the server's CPU time an iteration.
- Events not compressed on their way over loopback: 3 ms of the driver's CPU time an iteration, 2 of the server's.
- No event persister (the UI's event feed; runs, task runs, states and logs do not need it): 150 -> 115 ms, and 40
  instead of 160 kB of database an iteration.
"""

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import certifi
import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_KEY,
    PREFECT_API_SSL_CERT_FILE,
    PREFECT_API_URL,
    PREFECT_CLIENT_CSRF_SUPPORT_ENABLED,
    PREFECT_CLIENT_CUSTOM_HEADERS,
    temporary_settings,
)

from cairn.configs.errors import Failure
from cairn.configs.schema.base import displayed_address, has_credentials
from cairn.engines.processes.ports import bypass_proxy_for_loopback
from cairn.flows.orchestration.server_process import STOP_TIMEOUT, database_url_in

PREFECT_HOME = Path(".cairn/prefect")
"""Folder with database and log of the embedded server, relative to the working directory."""

CHILD = "cairn.flows.orchestration.server_process"

START_TIMEOUT = 120.0
"""Seconds until a server must respond; measured: 4 on an idle machine, 27 on a loaded one."""

MOST_RESTARTS = 3
"""Number of consecutive restarts of a server that dies, at most."""

STABLE_UPTIME = 60.0
"""Seconds of uptime after which a death of the server no longer counts as consecutive."""

_DEFAULTS = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "64",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "DO_NOT_TRACK": "1",
}
"""Settings of an embedded server; environment variables override each."""


class ServerFailed(Failure):
    """Prefect's server did not start, or has ended for good. The message contains the reason and what to do."""


class Server:
    """A Prefect server in a child process, over the database in `home`. It ends with this process.

    After its first response it is restarted whenever it dies, at most `MOST_RESTARTS` times in a row.
    """

    def __init__(self, home: Path, *, host: str = "127.0.0.1", port: int = 0, is_shared: bool = False) -> None:
        """Start the process and return at once; it waits for `serve`.

        Port 0 selects a free port; raises ServerFailed if `port` is in use. `is_shared`: other users connect too, with
        the password in the environment; otherwise the server requires none.
        """
        self.home = home = folder_for(home)
        self.log = home / "server.log"
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._host = host
        self._listener = _listen(host, port)
        address = "127.0.0.1" if host == "0.0.0.0" else host  # at which this machine reaches the server
        self.ui_url = f"http://{address}:{self._listener.getsockname()[1]}"
        self.api_url = f"{self.ui_url}/api"
        self._is_shared = is_shared
        self._changing = threading.Lock()
        self._serves = self._ready = self._stopped = False
        self._process = self._spawn()
        self._watcher = threading.Thread(target=self._watch, name="prefect-server", daemon=True)
        self._watcher.start()

    def serve(self) -> None:
        """Let the server serve as soon as it can."""
        with self._changing:
            if not self._serves:
                self._serves = True
                _start_serving(self._process)

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Let the server serve, and return when it responds. Stops it and raises ServerFailed if it does not within
        `timeout`."""
        self.serve()
        try:
            # The connection waits in the backlog; it is reset if the server dies.
            httpx.get(f"{self.api_url}/health", timeout=timeout, trust_env=False).raise_for_status()
        except httpx.HTTPError as error:
            late = isinstance(error, httpx.TimeoutException)
            why = f"did not respond within {timeout:.0f} s" if late else f"died while it started ({error})"
            self.stop()
            raise ServerFailed(
                f"the embedded Prefect server {why}. Its log is {self.log}; delete {self.home} if its database is "
                f"broken, or set PREFECT_API_URL to use another server. Last lines of the log:\n{self._log_tail()}"
            ) from error
        self._ready = True

    @property
    def pid(self) -> int:
        """Process id of the server; after its end, of the last process."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether the server is running or being restarted."""
        return self._watcher.is_alive()

    def wait(self) -> int:
        """Block until the server has ended for good; return its exit status."""
        self._watcher.join()
        return self._process.wait()

    def stop(self) -> None:
        """End the process; it writes pending data first. Does nothing if it has ended."""
        with self._changing:
            self._stopped = True
            self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._watcher.join()

    def _spawn(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", CHILD, str(self._listener.fileno()), str(os.getpid()), self._host],
                env=(_environment if self._is_shared else private_environment)(self.home, self.api_url),
                pass_fds=[self._listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _watch(self) -> None:
        """Restart the server within the limit; then close the listener, which resets waiting connections."""
        in_a_row = 0
        with self._listener:
            while True:
                began = time.monotonic()
                self._process.wait()
                in_a_row = 1 if time.monotonic() - began > STABLE_UPTIME else in_a_row + 1
                with self._changing:
                    if self._stopped or not self._ready or in_a_row > MOST_RESTARTS:
                        return
                    self._process = self._spawn()
                    _start_serving(self._process)

    def _log_tail(self, lines: int = 20) -> str:
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])


def _start_serving(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # it may have died
        stdin.write(b"serve")


_servers: dict[Path, Server] = {}
_servers_lock = threading.Lock()


def ensure_server(home: Path) -> Server:
    """Return this process's server over `home`, started if there is none; it ends with the process.

    Returns before the server serves, so that the caller can do other work meanwhile: call `wait_ready`.
    """
    with _servers_lock:
        server = _servers.get(home.resolve())
        if server is None or not server.alive():
            server = _servers[home.resolve()] = Server(home)
            # Prefect sends its last events and logs before atexit functions run.
            atexit.register(server.stop)
        return server


def prepare_server(home: Path) -> None:
    """Start the server that `prefect_api(home)` will need, if it will need one; do not wait for it."""
    if configured_api() is None:
        ensure_server(home)


def folder_for(home: Path) -> Path:
    """Return the resolved folder; create it where it is missing. Raises ServerFailed."""
    home = home.resolve()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ServerFailed(
            f"{home}, the folder for Prefect's history and logs, cannot be created ({why}): run in another folder, or "
            "make room for it"
        ) from error
    return home


def require_response(api: str) -> None:
    """Raise ServerFailed unless the configured server, with the URL `api`, responds as a Prefect server."""
    try:
        with get_client(sync_client=True) as client:
            client.read_flows(limit=1)
    except (httpx.HTTPError, httpx.InvalidURL, PrefectHTTPStatusError, ObjectNotFound, ValueError) as error:
        message = "" if has_credentials(api) else str(error)  # the library repeats the address
        why = next(iter(message.splitlines()), type(error).__name__)
        raise ServerFailed(
            f"Prefect's server at {displayed_address(api)}, which PREFECT_API_URL or the Prefect profile names, does "
            f"not respond like one ({why}): start it, correct the address (it ends in /api), or unset it"
        ) from (None if has_credentials(api) else error)


def configured_api() -> str | None:
    """Return the URL of the API that the environment or the active Prefect profile names; None without one."""
    return PREFECT_API_URL.value()


@contextmanager
def prefect_api(home: Path) -> Iterator[str]:
    """Run flows against the configured API, or else against the embedded server over `home`. Yields the API's URL.

    Applies to this thread and to threads that copy its context, as Prefect's task runners do. A thread that runs flows
    and is started in another way needs `contextvars.copy_context().run`. A process should use one API only: Prefect
    sends task runs to the first API that it used. Raises ServerFailed, also where the block fails because the API did.
    """
    configured = configured_api()
    if configured is not None:
        with _naming_failures(
            f"Prefect's server at {displayed_address(configured)}", "check that server, or unset PREFECT_API_URL"
        ):
            yield configured
        return
    bypass_proxy_for_loopback()
    server = ensure_server(home)
    server.wait_ready()
    settings = temporary_settings(
        {
            PREFECT_API_URL: server.api_url,
            PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False,
            # Credentials of a team's server, which must not go to this one.
            PREFECT_API_AUTH_STRING: None,
            PREFECT_API_KEY: None,
            PREFECT_CLIENT_CUSTOM_HEADERS: {},
            # Each client reads its trust store: 20 ms for that of certifi, and plain HTTP over loopback needs no
            # certificate.
            PREFECT_API_SSL_CERT_FILE: str(_smallest_trust_store(server.home)),
        }
    )
    with settings, _naming_failures("the embedded Prefect server", f"its log is {server.log}"):
        yield server.api_url


@contextmanager
def _naming_failures(server: str, advice: str) -> Iterator[None]:
    """Convert errors of Prefect's client, after its last retry, into ServerFailed."""
    try:
        yield
    except (httpx.HTTPError, PrefectHTTPStatusError, ObjectNotFound) as error:
        why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise ServerFailed(f"{server} failed, or lost its database ({why}): {advice}") from error


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ServerFailed(f"cannot listen on {host}:{port}: {error.strerror}. Choose another port") from error
    listener.listen(128)
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    return host == "localhost" or host.startswith("127.")


def _environment(home: Path, api_url: str) -> dict[str, str]:
    client_only = ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH")
    return {
        **_DEFAULTS,
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database_url_in(home),
        # Pages of other servers may neither read anything here nor send requests: see `OwnPages`.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": api_url.removesuffix("/api"),
        **{name: value for name, value in os.environ.items() if name not in client_only},
        "PREFECT_HOME": str(home),
        # Relative, so that a page works under every name of this machine.
        "PREFECT_SERVER_UI_API_URL": "/api",
    }


def private_environment(home: Path, api_url: str) -> dict[str, str]:
    """Return the environment of a server for this process alone: without settings of a team's server, such as its
    password."""
    environment = _environment(home, api_url)
    own = {name: value for name, value in environment.items() if name not in _TEAM_SETTINGS}
    return own | {"PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "false"}


_TEAM_SETTINGS = (
    "PREFECT_SERVER_API_AUTH_STRING",
    "PREFECT_SERVER_API_BASE_PATH",
    "PREFECT_API_AUTH_STRING",
    "PREFECT_API_KEY",
    "PREFECT_CLIENT_CUSTOM_HEADERS",
)


def _smallest_trust_store(home: Path) -> Path:
    path = home / "trust-store.pem"
    if not path.exists():
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----\n"
        pem = Path(certifi.where()).read_text()
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(pem[pem.index(begin) : pem.index(end) + len(end)])
        written.rename(path)
    return path
