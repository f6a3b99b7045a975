"""The embedded Prefect server: history, lifetime and what it refuses."""

import contextlib
import os
import pty
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from cairn.flows.orchestration.server import (
    CHILD,
    MOST_RESTARTS,
    Server,
    ServerFailed,
    ensure_server,
    prefect_api,
    private_environment,
)

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]

DRIVER = """
import logging, sys, time
from pathlib import Path
from prefect import flow
from cairn.flows.orchestration.server import prefect_api

@flow(name="left-behind")
def left_behind():
    print("running", flush=True)
    time.sleep(float(sys.argv[2]))

logging.getLogger("EventsWorker").setLevel("ERROR")  # it warns where a busy machine lets it wait at the end
with prefect_api(Path(sys.argv[1])):
    left_behind()
"""


def servers_of(parent: int) -> list[psutil.Process]:
    """Server processes that a driver has started."""
    return [
        child
        for child in psutil.Process(parent).children()
        if "cairn.flows.orchestration.server_process" in child.cmdline()
    ]


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    return httpx.post(f"{server.api_url}{path}", json=body, timeout=60).raise_for_status().json()


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Two servers that started over one fresh home at the same time, and beside its database a copy from then."""
    home = tmp_path_factory.mktemp("home")
    servers = Server(home), Server(home)
    for server in servers:
        server.serve()
    for server in servers:
        server.wait_ready()
    with contextlib.closing(sqlite3.connect(home / "prefect.db", timeout=60)) as database:
        database.execute("VACUUM INTO ?", [str(home / "empty.db")])
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def server(twins: tuple[Server, Server]) -> Server:
    return twins[0]


@pytest.fixture
def home(twins: tuple[Server, Server], tmp_path: Path) -> Path:
    """Without any history, but with the tables, which take most of the time of a first start."""
    home = tmp_path / "home"
    home.mkdir()
    shutil.copyfile(twins[0].home / "empty.db", home / "prefect.db")
    return home


def test_the_configured_api_is_used_and_no_server_started(tmp_path: Path) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}), prefect_api(tmp_path / "home") as url:
        assert url == "http://127.0.0.1:1/api"
    assert not (tmp_path / "home").exists()


def test_passwords_of_a_teams_server_reach_no_server_of_our_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY"):
        monkeypatch.setenv(name, "admin:pass")
    private = private_environment(home, "http://127.0.0.1:1/api")
    assert "admin:pass" not in private.values()
    with (
        temporary_settings({PREFECT_API_AUTH_STRING: "admin:pass"}),
        prefect_api(home),
        get_client(sync_client=True) as client,
    ):
        assert "authorization" not in client._client.headers
        client.read_flows(limit=1)


def test_the_interface_is_served_and_finds_its_api(server: Server) -> None:
    page = httpx.get(server.ui_url, follow_redirects=True, headers={"accept": "text/html"}, timeout=60)
    assert "<title>Prefect" in page.text
    assert httpx.get(f"{server.ui_url}/ui-settings", timeout=60).json()["api_url"] == "/api"


def test_pages_of_other_servers_get_no_answer_from_its_api(server: Server) -> None:
    def allowed(origin: str) -> str | None:
        requests = {"origin": origin, "access-control-request-method": "POST"}
        headers = httpx.options(f"{server.api_url}/flow_runs/filter", headers=requests, timeout=60).headers
        return headers.get("access-control-allow-origin")

    assert allowed(server.ui_url) == server.ui_url
    assert allowed("http://example.org") is None


def test_a_taken_port_is_named(server: Server, tmp_path: Path) -> None:
    port = httpx.URL(server.api_url).port
    assert port is not None
    with pytest.raises(ServerFailed, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        Server(tmp_path, port=port)


@pytest.mark.slow
def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "prefect.db").write_bytes(b"no database" * 1000)
    server = Server(tmp_path)
    with pytest.raises(ServerFailed, match=r"died while it started(.|\n)*file is not a database"):
        server.wait_ready()
    assert not server.alive()


@pytest.mark.slow
def test_a_server_that_dies_is_replaced_on_its_socket_and_its_clients_go_on(home: Path) -> None:
    @flow(name="one")
    def one() -> None: ...

    with prefect_api(home):
        one()
        server = ensure_server(home)
        first = server.pid
        os.kill(first, signal.SIGKILL)
        one()
        assert server.pid != first
        body = {"flows": {"name": {"any_": ["one"]}}}
        states = [run["state_type"] for run in post(server, "/flow_runs/filter", body)]
        server.stop()
    assert states == ["COMPLETED", "COMPLETED"]
    assert not server.alive()


@pytest.mark.slow
def test_a_server_that_keeps_dying_is_given_up_and_said_so(home: Path) -> None:
    killed = set()

    def use_a_server_that_keeps_dying() -> None:
        with prefect_api(home) as url:
            server = ensure_server(home)
            while server.alive():
                pid = server.pid
                killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            httpx.get(f"{url}/health")

    with pytest.raises(ServerFailed, match=r"the embedded Prefect server failed.*its log is .*server\.log"):
        use_a_server_that_keeps_dying()
    assert len(killed) == 1 + MOST_RESTARTS


def test_servers_over_one_home_show_the_same_history(twins: tuple[Server, Server]) -> None:
    created = post(twins[0], "/flows/", {"name": "shared"})
    assert httpx.get(f"{twins[1].api_url}/flows/name/shared", timeout=60).json()["id"] == created["id"]


def test_requests_wait_for_other_writers_of_the_database_instead_of_failing(server: Server) -> None:
    done = threading.Event()

    def write() -> None:
        with sqlite3.connect(server.home / "prefect.db", timeout=30, isolation_level=None) as database:
            database.execute("CREATE TABLE other_writer (value INTEGER)")
            while not done.wait(0.002):
                database.execute("INSERT INTO other_writer VALUES (1)")

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        flow_id = post(server, "/flows/", {"name": "contended"})["id"]
        body = {"flow_id": flow_id, "state": {"type": "PENDING"}}
        with httpx.Client(timeout=60) as client:
            statuses = {client.post(f"{server.api_url}/flow_runs/", json=body).status_code for _ in range(30)}
    finally:
        done.set()
        writer.join()
    assert statuses == {201}


def test_a_killed_driver_leaves_no_server_and_the_next_one_adds_to_its_history(tmp_path: Path, home: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    driver = subprocess.Popen([sys.executable, str(script), str(home), "600"], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "running\n"
    (orphan,) = servers_of(driver.pid)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    psutil.wait_procs([orphan], timeout=120)
    assert not orphan.is_running()

    quiet = {**os.environ, "PREFECT_LOGGING_LEVEL": "ERROR"}
    arguments = [sys.executable, str(script), str(home), "0"]
    finished = subprocess.run(arguments, capture_output=True, text=True, env=quiet, timeout=300, check=True)
    assert (finished.stdout, finished.stderr) == ("running\n", "")
    with sqlite3.connect(home / "prefect.db") as database:
        states = database.execute("SELECT state_type FROM flow_run ORDER BY created").fetchall()
    assert states == [("RUNNING",), ("COMPLETED",)]


def test_a_server_that_nobody_tells_to_serve_makes_no_database(tmp_path: Path) -> None:
    environment = os.environ | {"PREFECT_HOME": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        descriptor = listener.fileno()
        command = [sys.executable, "-m", CHILD, str(descriptor), str(os.getpid()), "127.0.0.1"]
        parentless = subprocess.DEVNULL
        ended = subprocess.run(command, env=environment, pass_fds=[descriptor], stdin=parentless, timeout=120)
    assert ended.returncode == 1
    assert not list(tmp_path.glob("*.db"))


def test_a_server_whose_driver_is_gone_before_it_serves_ends_without_a_database(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    database = tmp_path / "prefect.db"
    environment = os.environ | {
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}",
    }
    with socket.create_server(("127.0.0.1", 0)) as listener:
        descriptor = listener.fileno()
        command = [sys.executable, "-m", CHILD, str(descriptor), str(gone.pid), "127.0.0.1"]
        ended = subprocess.run(command, env=environment, pass_fds=[descriptor], timeout=120)
    assert ended.returncode == 1
    assert not database.exists()


def test_nothing_is_reported_to_the_makers_of_prefect(tmp_path: Path) -> None:
    terminal, other_end = pty.openpty()
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    subprocess.run(
        [sys.executable, "-c", "import cairn.flows.orchestration.server"],
        env=environment,
        stdout=other_end,
        stderr=other_end,
        timeout=300,
    )
    os.close(other_end)
    with pytest.raises(OSError, match="Input/output error"):  # what a terminal with nothing to read says
        os.read(terminal, 1000)
    assert not (tmp_path / ".prefect" / ".sdk_telemetry").exists()
