"""`cairn up`: Prefect's server, a process that serves the deployments, and a Ray cluster, for the lifetime of this
process.

    this process ── Prefect's server (cairn.flows.orchestration.server), unless one is configured
                 ├─ the deployments  (cairn.flows.deployments.serving) ── a driver for each flow run
                 ├─ the board        (cairn.flows.board.serving)
                 └─ a Ray head       (cairn.engines.fleet.head), unless one exists or none is wanted

Each child ends with its parent, however the parent ended. `close` ends them in reverse order: drivers release their
runs while the server can still receive their states. A child that dies is restarted, at most three times in a row.
"""

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from cairn.engines.fleet.address import ADDRESS
from cairn.flows.board.serving import TOKEN, free_address, new_token
from cairn.flows.orchestration.artifacts.pages import LINK
from cairn.flows.orchestration.server import (
    MOST_RESTARTS,
    PREFECT_HOME,
    STABLE_UPTIME,
    Server,
    ServerFailed,
    configured_api,
    folder_for,
    require_response,
)
from cairn.storage.opening import open_store

SERVING = "cairn.flows.deployments.serving"
HEAD = "cairn.engines.fleet.head"
BOARD = "cairn.flows.board.serving"

SERVING_END = 60.0
"""Seconds that the deployments' process has to end, with all drivers."""
HEAD_END = 60.0
BOARD_END = 5.0

START_TIMEOUT = 300.0
"""Seconds until a child must have printed its first line."""

CPUS_PER_CORE = 8
"""Logical CPUs that Ray offers for each real one. They are only for accounting: Ray does not limit CPU use."""


class Child:
    """A Cairn module as a child process. It prints a line when it is up, and is restarted when it dies."""

    def __init__(self, name: str, module: str, *arguments: str, log: Path, environment: dict[str, str]) -> None:
        self.name, self.log = name, log
        self._command = [sys.executable, "-P", "-m", module, str(os.getpid()), *arguments]
        self._environment = environment
        self._up, self._ended = threading.Event(), threading.Event()
        self._stopping = False
        self._input: str | None = None
        self._changing = threading.Lock()
        self._first_line = ""
        self._process = self._spawn()
        self._watcher = threading.Thread(target=self._watch, name=name, daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def state(self) -> str:
        if self._ended.is_set():
            return "stopped" if self._stopping else "failed"
        return "up" if self._up.is_set() else "starting"

    def wait_up(self, timeout: float = START_TIMEOUT) -> str:
        """Wait for the child's first line and return it. Raises ServerFailed if the child ends before, or after the
        timeout."""
        end = time.monotonic() + timeout
        while not self._up.wait(0.1):
            if self._ended.is_set() or time.monotonic() > end:
                raise ServerFailed(f"{self.name} did not start; the end of its log, {self.log}:\n{self._tail()}")
        return self._first_line

    def send(self, line: str) -> None:
        """Write a line to the child's stdin, and to that of each process that replaces it."""
        with self._changing:
            self._input = line
            self._write()

    def require(self) -> None:
        """Raise ServerFailed if the child has ended and is not restarted."""
        if self._ended.is_set():
            raise ServerFailed(f"{self.name} ended by itself; the end of its log, {self.log}:\n{self._tail()}")

    def stop(self, timeout: float) -> None:
        """Send SIGTERM to the child, and kill it after the timeout."""
        with self._changing:
            self._stopping = True
            with suppress(ProcessLookupError):
                self._process.terminate()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._watcher.join()

    def _write(self) -> None:
        if self._input is not None:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError), self._process.stdin as stdin:  # it may have died
                stdin.write(self._input + "\n")

    def _spawn(self) -> "subprocess.Popen[str]":
        with self.log.open("a") as log:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def _watch(self) -> None:
        in_a_row = 0
        while True:
            began = time.monotonic()
            assert self._process.stdout is not None
            self._listen(self._process.stdout)
            self._process.wait()
            was_up = self._up.is_set()
            in_a_row = 1 if time.monotonic() - began > STABLE_UPTIME else in_a_row + 1
            with self._changing:
                self._up.clear()
                if self._stopping or not was_up or in_a_row > MOST_RESTARTS:
                    self._ended.set()
                    return
                self._process = self._spawn()
                self._write()

    def _listen(self, output: IO[str]) -> None:
        """Store the first line, and write the others to the log."""
        with output, self.log.open("a") as log:
            for line in output:
                if self._up.is_set():
                    log.write(line)
                    log.flush()
                else:
                    self._first_line = line.strip()
                    self._up.set()

    def _tail(self, lines: int = 12) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@dataclass
class Up:
    """The running processes and their addresses."""

    ui_url: str
    api_url: str
    store: str
    server: Server | None
    """Prefect's server; None where another one is configured."""
    serving: Child
    ray: Child | None
    """The Ray head; None where none was wanted, or a cluster already exists."""
    ray_address: str | None
    """Address of the cluster that runs join; None where each starts its own."""
    board: Child
    board_url: str
    """Address of the board with its token."""
    _closing: ExitStack = field(default_factory=ExitStack)

    def require(self) -> None:
        """Raise ServerFailed if a part has ended for good."""
        if self.server is not None and not self.server.alive():
            raise ServerFailed(f"the Prefect server ended by itself; its log is {self.server.log}")
        self.serving.require()
        self.board.require()
        if self.ray is not None:
            self.ray.require()

    def close(self) -> None:
        """End every process that `start` started, drivers first."""
        self._closing.close()


def start(store: str, *, host: str, port: int, ray: bool) -> Up:
    """Start the missing processes; return when the UI is available and the deployments are registered.

    `store`: a URL or folder, for flow runs that name none. Raises ServerFailed, and StoreRefused where it is no store.
    """
    store = open_store(store).url  # a bad store is refused here, not in every flow run
    home = folder_for(PREFECT_HOME)
    with ExitStack() as stack:
        api = configured_api()
        server = None
        if api is None:
            server = Server(home, host=host, port=port, is_shared=True)
            stack.callback(server.stop)
            server.serve()
            api = server.api_url
        else:
            require_response(api)
        address = os.environ.get(ADDRESS)
        head = None
        if ray and not address:
            cpus = str(CPUS_PER_CORE * (os.cpu_count() or 1))
            head = Child("the Ray head", HEAD, cpus, log=home / "ray.log", environment=dict(os.environ))
            stack.callback(head.stop, HEAD_END)
        board_url, token = free_address(host, port + 1 if port else 0), new_token()
        environment = os.environ | {"PREFECT_API_URL": api, "CAIRN_STORE": store, LINK: board_url}
        if server is not None and (password := os.environ.get("PREFECT_SERVER_API_AUTH_STRING")):
            environment.setdefault("PREFECT_API_AUTH_STRING", password)
        if head is not None:  # a new cluster requires Ray's token, and joining drivers must send it
            environment.setdefault("RAY_AUTH_MODE", "token")
        serving = Child("the deployments' process", SERVING, log=home / "serving.log", environment=environment)
        stack.callback(serving.stop, SERVING_END)
        board_port = board_url.rpartition(":")[2]
        board = Child(
            "the board", BOARD, host, board_port, log=home / "board.log", environment=environment | {TOKEN: token}
        )
        stack.callback(board.stop, BOARD_END)
        if server is not None:
            server.wait_ready()
        if head is not None:
            address = head.wait_up()
        serving.send(address or "")
        serving.wait_up()
        board.wait_up()
        return Up(
            api.removesuffix("/api"), api, store, server, serving, head, address or None, board,
            f"{board_url}/#token={token}", stack.pop_all(),
        )  # fmt: skip
