"""No page of somebody else's asks anything of Prefect's server: in a browser, and header by header."""

import asyncio
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from cairn.flows.orchestration.server import Server, ServerFailed, require_response
from cairn.flows.orchestration.server_process import HOSTS, SameOriginOnly, refusal
from tests.browser import REBOUND, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

JSON = ("content-type", "application/json")
BODY = ("content-length", "2")
FROM_ELSEWHERE = ("sec-fetch-site", "cross-site")
LINK = (("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document"))

REFUSED: list[tuple[str, str, tuple[tuple[str, str], ...]]] = [
    ("GET", "evil.example:4200", ()),
    ("GET", "127.0.0.1.evil.example:4200", ()),
    ("GET", "localhost.evil.example", ()),
    ("GET", "127.0.0.1:4200@evil.example", ()),
    ("GET", "", ()),
    ("GET", "127.0.0.1:4200", (("host", "evil.example"),)),
    ("POST", "127.0.0.1:4200", (("origin", "http://evil.example"), BODY, JSON)),
    ("POST", "127.0.0.1:4200", (("origin", "http://127.0.0.1:8000"), BODY, JSON)),
    ("POST", "127.0.0.1:4200", (("origin", "null"), BODY, JSON)),
    ("GET", "127.0.0.1:4200", (FROM_ELSEWHERE,)),
    ("GET", "127.0.0.1:4200", (("sec-fetch-site", "same-site"),)),
    ("POST", "127.0.0.1:4200", (FROM_ELSEWHERE, *LINK)),
    ("GET", "127.0.0.1:4200", (FROM_ELSEWHERE, ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "iframe"))),
    ("POST", "127.0.0.1:4200", (BODY,)),
    ("POST", "127.0.0.1:4200", (BODY, ("content-type", "text/plain; application/json"))),
    ("POST", "127.0.0.1:4200", (("transfer-encoding", "chunked"), ("content-type", "text/plain"))),
    ("PUT", "127.0.0.1:4200", (BODY, ("content-type", "multipart/form-data"))),
]
TAKEN: list[tuple[str, str, tuple[tuple[str, str], ...]]] = [
    ("GET", "127.0.0.1:4200", ()),
    ("GET", "[::1]:4200", ()),
    ("GET", "LOCALHOST:4200", ()),
    ("GET", "10.0.0.7", ()),
    ("GET", "ours:4200", ()),
    ("GET", "127.0.0.1:4200", (FROM_ELSEWHERE, *LINK)),
    ("GET", "127.0.0.1:4200", (("sec-fetch-site", "none"),)),
    ("POST", "127.0.0.1:4200", (BODY, JSON)),
    ("POST", "127.0.0.1:4200", (BODY, ("content-type", "application/json; charset=utf-8"))),
    ("POST", "127.0.0.1:4200", (("content-length", "0"),)),
    ("DELETE", "127.0.0.1:4200", ()),
    ("POST", "ours", (("origin", "https://ours"), ("sec-fetch-site", "same-origin"), BODY, JSON)),
]


def answer(method: str, host: str, headers: tuple[tuple[str, str], ...]) -> str | None:
    sent = [("host", host), *headers] if host else [*headers]
    return refusal(method, [(name.encode(), value.encode()) for name, value in sent], {"localhost", "ours"})


def test_what_a_page_of_another_origin_can_send_is_refused_and_what_programs_and_own_pages_send_is_taken() -> None:
    assert [request for request in REFUSED if answer(*request) is None] == []
    assert [(request, reply) for request in TAKEN if (reply := answer(*request)) is not None] == []


def test_further_names_of_this_machine_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOSTS, "prefect, cairn.example")
    requests: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        requests.append(dict(scope["headers"])[b"host"].decode())

    async def unheard(*_: Any) -> None:
        pass

    for host in ("prefect:4200", "cairn.example", "evil.example"):
        asyncio.run(SameOriginOnly(app)({"type": "http", "headers": [(b"host", host.encode())]}, unheard, unheard))
    assert requests == ["prefect:4200", "cairn.example"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("home"))
    started.wait_ready()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    """URL of an empty page of another origin."""

    class Empty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>elsewhere</title>")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Empty) as served:
        Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://{REBOUND}:{served.server_address[1]}/"
        served.shutdown()


AUTOMATION = """{"name": "evil", "actions": [{"type": "run-deployment", "source": "inferred", "parameters": {}}],
"trigger": {"type": "event", "posture": "Reactive", "expect": ["prefect.deployment.ready"],
"for_each": ["prefect.resource.id"], "threshold": 1, "within": 0}}"""
ASK = """async ([url, body, mode]) => {
  try { return (await fetch(url, {method: "POST", mode, body: new Blob([body])})).status }
  catch (error) { return String(error) } }"""


def automations(server: Server) -> list[str]:
    found = httpx.post(f"{server.api_url}/automations/filter", json={}, timeout=60).raise_for_status().json()
    return [one["name"] for one in found]


def ask(page: "Page", url: str, mode: str) -> Any:
    return page.evaluate(ASK, [url, AUTOMATION, mode])


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_a_page_of_another_origin_changes_nothing(browser: "Browser", server: Server, elsewhere: str) -> None:
    with visit(browser, elsewhere) as visited:
        assert ask(visited.page, f"{server.api_url}/automations/", "no-cors") == 0, "sent, and its answer not read"
    assert automations(server) == []


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_a_page_whose_name_was_pointed_here_is_told_nothing(browser: "Browser", server: Server, elsewhere: str) -> None:
    port = server.ui_url.rpartition(":")[2]
    with visit(browser, elsewhere) as visited:
        rebound = f"http://{REBOUND}:{port}"
        visited.page.goto(f"{rebound}/api/health")  # whatever is shown there is of this origin
        assert visited.page.evaluate("location.origin") == rebound
        assert ask(visited.page, f"{rebound}/api/automations/", "same-origin") == 403
        script = 'async () => (await fetch("/api/deployments/filter", {method: "POST", body: "{}", headers: '
        script += '{"content-type": "application/json"}})).status'
        assert visited.page.evaluate(script) == 403
    assert automations(server) == []


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_prefects_own_page_works(browser: "Browser", server: Server) -> None:
    refused: list[str] = []
    with visit(browser, "about:blank") as visited:
        visited.page.on("response", lambda got: refused.append(got.url) if got.status >= 400 else None)
        with visited.page.expect_response("**/api/**/filter") as response:
            visited.page.goto(server.ui_url)
        assert response.value.status == 200
        visited.page.wait_for_load_state("networkidle")
    assert refused == []


def test_a_configured_server_that_does_not_answer_is_named_without_its_password() -> None:
    api = "http://user:SECRETKEY123@127.0.0.1:9/api"
    named = pytest.raises(ServerFailed, match="Prefect's server at an address with credentials")
    with temporary_settings({PREFECT_API_URL: api}), named as failed:
        require_response(api)
    assert "SECRETKEY123" not in str(failed.value)
