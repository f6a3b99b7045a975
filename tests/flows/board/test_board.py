"""The board in a real browser: it shows what is committed, as it is committed, and changes nothing without a token."""

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn
from starlette.testclient import TestClient

from cairn.flows.board import reader as reading
from cairn.flows.board.app import Board
from cairn.flows.board.contents import RunContents
from cairn.flows.board.reader import RunReader, StoreReader
from cairn.flows.board.serving import address, listen
from cairn.flows.orchestration.server_process import SameOriginOnly
from cairn.storage.ledger.decisions import Gate, GateState
from cairn.storage.ledger.leases import DriverFailure, Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from tests.browser import REBOUND, Visit, visit
from tests.commands import cairn
from tests.flows import written_runs
from tests.flows.report.test_page import HOSTILE
from tests.flows.written_runs import new_run, recorded_reads, write_iteration, write_run
from tests.waiting import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TOKEN = "a-token"
FAILURE = DriverFailure(
    kind="EngineFailed",
    error="server </dl><script>window.ran = 9</script> is gone",
    iteration=1,
    step="rollout",
    tries=3,
)
NARROW = 400


@dataclass(frozen=True)
class Served:
    """A board in this process, and the runs of its store."""

    url: str
    done: Ledger
    """Complete."""
    working: Ledger
    """Owned by this process, with one iteration."""
    gated: Ledger
    """Waits before its second iteration."""
    failed: Ledger
    """Ended after one iteration with an error of its samples' code."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = str(tmp_path_factory.mktemp("store"))
    usual = written_runs.rollout_table

    def hostile(iteration: int, groups: tuple[int, ...], version: int) -> object:
        table = usual(iteration, groups, version)
        rows = [row | {"prompt_text": HOSTILE, "label": HOSTILE} for row in table.to_pylist()]
        return table.from_pylist(rows, table.schema)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written_runs, "rollout_table", hostile)
        done = new_run(folder, "done")
        write_run(done, 3)
    assert done.lease is not None
    done.lease.release(Outcome.COMPLETED)
    working = new_run(folder, "working", rollout={"num_rollout": 50})
    gated = new_run(folder, "gated", approval={"before": [1]})
    failed = new_run(folder, "failed")
    for ledger in (working, gated, failed):
        write_iteration(ledger, 0)
    assert failed.lease is not None
    failed.lease.release(Outcome.FAILED, FAILURE)
    gated.decisions.record(lambda so_far: Gate(iteration=1, cause="before"), why="as asked")
    reader = StoreReader(open_store(folder), price=2.0)
    with listen("127.0.0.1", 0) as listener:
        config = uvicorn.Config(SameOriginOnly(Board(reader, TOKEN, 2.0).app()), log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        yield Served(address(listener), done, working, gated, failed)
        server.should_exit = True
        thread.join()
    reader.close()


def ready(visited: Visit) -> "Page":
    visited.page.locator("html[data-state=ready]").wait_for(state="attached")
    return visited.page


def test_all_runs_are_in_one_table_and_chosen_ones_share_their_curves(served: Served, browser: "Browser") -> None:
    with visit(browser, f"{served.url}/#done,working", viewport={"width": 1440, "height": 900}) as visited:
        page = ready(visited)
        rows = page.locator("#runs-table .tabulator-row")
        wait_for(lambda: page.locator("#runs-table .spark svg").count() == 4)
        assert {row.split("\n")[0] for row in rows.all_inner_texts()} == {"done", "working", "gated", "failed"}
        states = page.locator("#runs-table .state").all_inner_texts()
        assert sorted(states) == ["completed", "failed", "running", "waiting"]
        reasons = page.locator("#runs-table .reason")
        assert set(reasons.all_inner_texts()) - {""} == {
            f"iteration 1, rollout: {FAILURE.error}", "before iteration 1: as asked"
        }  # fmt: skip
        title = reasons.filter(has_text="rollout").get_attribute("title")
        assert title is not None
        assert title.endswith("this, 3 of 3 tries of rollout")
        page.get_by_role("columnheader", name="Run").click()
        assert rows.first.inner_text().startswith("done")
        page.get_by_role("columnheader", name="Run").click()
        assert rows.first.inner_text().startswith("working")
        reward = page.locator("figure").filter(has=page.get_by_role("heading", name="Reward", exact=True))
        reward.locator("canvas").wait_for()
        assert reward.locator(".legend li:not(.at)").count() == 2
        page.get_by_role("checkbox", name="curves of gated").check()
        wait_for(lambda: reward.locator(".legend li:not(.at)").count() == 3)
        assert page.url.endswith("#done,working,gated")
        page.get_by_role("searchbox", name="Search runs").fill("gat")
        assert page.locator("#runs-count").inner_text() == "1 of 4 runs"
        page.get_by_role("searchbox", name="Search runs").fill("is gone")
        rows.first.get_by_role("link", name="failed").click()
        box = ready(visited).get_by_label("Why it ended")
        names = ["what happened", "commonest error", "what stands", "next"]
        assert box.locator("dt").all_inner_texts() == names
        assert "iteration 0, weight version 1" in box.inner_text()
        visited.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        box.get_by_role("button", name="Copy").click()
        box.get_by_role("button", name="Copied").wait_for()
        copied = visited.page.evaluate("navigator.clipboard.readText()")
        assert copied.startswith(f"cd {Path.cwd()} && ")
        assert copied.endswith(f"cairn resume failed --store {served.failed.store.url}")
        assert visited.page.evaluate("window.ran") is None
        assert visited.errors == []


def test_what_is_committed_appears_and_what_is_read_stays(served: Served, browser: "Browser") -> None:
    with visit(browser, f"{served.url}/runs/working", viewport={"width": 1440, "height": 900}) as visited:
        page = ready(visited)
        place = page.locator("#overview .lead")
        assert place.inner_text().startswith("1 of 50 iterations")
        page.locator("#sample-table .tabulator-row").nth(3).click()
        title = page.locator("#sample-title").inner_text()
        page.locator("#sample-response .token").first.wait_for()
        write_iteration(served.working, 1)
        page.get_by_text("2 of 50 iterations").wait_for(timeout=5000)
        page.locator("#sample-count").get_by_text("12 samples").wait_for(timeout=5000)
        page.locator("#curves .at").first.get_by_text("iteration 1").wait_for(timeout=5000)
        assert page.locator("#sample-title").inner_text() == title, "a chosen sample stays in view"
        styles = page.locator("#sample-response .token").first.get_attribute("class") or ""
        assert "sequence-" in styles, "its tokens are coloured by their log-probs of −0.5"
        page.locator("#colouring").select_option("advantage")
        assert "balance-" in (page.locator("#sample-response .token").first.get_attribute("class") or "")
        page.get_by_role("spinbutton", name="last iteration").fill("0")
        page.get_by_role("spinbutton", name="first iteration").fill("0")
        page.get_by_role("spinbutton", name="first iteration").blur()
        page.locator("#sample-count").get_by_text("6 of 6 samples").wait_for(timeout=5000)
        assert visited.errors == []


def test_hostile_text_is_shown_and_runs_nothing(served: Served, browser: "Browser") -> None:
    with visit(browser, f"{served.url}/runs/done") as visited:
        page = ready(visited)
        page.locator("#sample-response .token").first.wait_for()
        assert "</script><script>window.ran = 1</script>" in page.locator("#sample-prompt").inner_text()
        assert page.evaluate("window.ran") is None
        page.evaluate("""() => { const one = document.createElement("script"); one.text = "window.ran = 4"
                                 document.body.append(one) }""")
        assert page.evaluate("window.ran") is None
        assert page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
        assert all(url.startswith((served.url, "blob:")) for url in visited.requests[:-1])


@pytest.mark.parametrize("path", ["/", "/runs/done"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_window_shows_all_without_scrolling_sideways(
    served: Served, browser: "Browser", path: str, scheme: Any
) -> None:
    size = {"width": NARROW, "height": 800}
    with visit(browser, served.url + path, viewport=size, color_scheme=scheme) as visited:
        page = ready(visited)
        page.locator("figure canvas").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == NARROW


def test_without_the_token_and_from_other_pages_nothing_changes(served: Served, browser: "Browser") -> None:
    with visit(browser, f"{served.url}/runs/gated") as visited:
        page = ready(visited)
        assert page.get_by_role("button", name="Approve").is_disabled()
        assert page.get_by_text("read-only").is_visible()
    port = served.url.rpartition(":")[2]
    with visit(browser, f"http://{REBOUND}:{port}/data/runs") as visited:
        assert "not a name of this machine" in visited.page.inner_text("body")
    approve, bearer = f"{served.url}/data/runs/gated/approve", {"Authorization": f"Bearer {TOKEN}"}
    for headers, status in {
        (): 401,
        (("Authorization", "Bearer wrong"),): 401,
        (*bearer.items(), ("Origin", "http://evil.example")): 403,
        (*bearer.items(), ("Sec-Fetch-Site", "same-site")): 403,
        (*bearer.items(), ("Content-Type", "text/plain")): 403,
    }.items():
        answer = httpx.post(approve, content="{}", headers={"Content-Type": "application/json", **dict(headers)})
        assert answer.status_code == status, (headers, answer.text)
        assert "access-control-allow-origin" not in answer.headers
    headers = {"Content-Type": "application/json", **bearer}
    assert httpx.post(approve, content="[" * 10**5, headers=headers).status_code == 400
    nothing = httpx.get(f"{served.url}/data/runs/gated/samples?first=5&last=1")
    assert (nothing.status_code, nothing.json()["bounds"]) == (200, [5, 1])
    assert httpx.get(served.url).headers["content-security-policy"] == "frame-ancestors 'none'"
    assert served.gated.decisions.gates()[1].state is GateState.OPEN


def test_a_gate_is_approved_by_a_button(served: Served, browser: "Browser") -> None:
    with visit(browser, f"{served.url}/#token={TOKEN}") as visited:
        ready(visited)
        assert TOKEN not in visited.page.url
        visited.page.goto(f"{served.url}/runs/gated")
        page = ready(visited)
        page.get_by_role("button", name="Approve").click()
        page.get_by_label("Why").fill("it learns")
        page.locator("dialog").get_by_role("button", name="Approve").click()
        page.get_by_text("Approved by").wait_for()
        page.get_by_role("button", name="Close").click()
        page.locator("#overview .state.running").wait_for()
        assert page.get_by_role("button", name="Approve").count() == 0
        assert visited.errors == []
        page.get_by_role("button", name="Fork here").click()
        page.get_by_label("Name of the new run").fill("../gated")
        page.locator("dialog").get_by_role("button", name="Fork here").click()
        page.locator("dialog .note.warning").wait_for()
    gate = served.gated.decisions.gates()[1]
    assert gate.state is GateState.APPROVED
    assert gate.verdict is not None
    assert gate.verdict.why == "it learns"


def test_cancel_lets_the_driver_on_this_machine_end(served: Served) -> None:
    store = served.done.store.url
    driver = f"""
import signal, time
from cairn.storage.ledger.leases import Lease, Outcome
from cairn.storage.opening import open_store
signal.signal(signal.SIGINT, signal.default_int_handler)  # as a driver does, whatever it inherits
lease = Lease.acquire(open_store({store!r}), "done")
print("ready", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    lease.release(Outcome.STOPPED)
"""
    cancel = f"{served.url}/data/runs/done/cancel"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with subprocess.Popen([sys.executable, "-P", "-c", driver], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        answer = httpx.post(cancel, json={}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert process.wait(60) == 0
    refused = httpx.post(cancel, json={}, headers=headers)
    assert (refused.status_code, refused.json()["detail"]) == (400, "run done has no driver")


def test_a_look_reads_only_what_is_new_and_nobody_looking_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = new_run(str(tmp_path), rollout={"num_rollout": 9})
    write_run(ledger, 4)
    run = RunReader(open_store(str(tmp_path)), "toy")
    reads = recorded_reads(monkeypatch)
    assert run.look()
    assert run.status.iterations == 4
    reads.clear()
    assert not run.look()
    assert sorted(reads) == ["runs/toy/decisions/000001.json", "runs/toy/run.json"], "it looks whether one is there"
    write_iteration(ledger, 4)
    reads.clear()
    assert run.look()
    assert run.status.iterations == 5
    assert not [path for path in reads if "iterations/000001" in path], "of old iterations nothing is read again"

    monkeypatch.setattr(reading, "PATIENCE", 0.2)
    store = StoreReader(open_store(str(tmp_path)))
    _, (row,) = store.rows()
    wait_for(lambda: store.rows()[1][0]["iterations"] == 5)
    assert row["run"] == "toy"

    def is_quiet() -> bool:
        reads.clear()
        time.sleep(0.6)
        return not reads

    wait_for(is_quiet, 20)
    store.close()


def test_the_board_reads_an_object_store(s3_url: str) -> None:
    ledger = new_run(s3_url)
    write_run(ledger, 2)
    store = StoreReader(open_store(s3_url))
    contents = RunContents(store.run("toy"))
    assert "2 of 3 iterations" in contents.facts()["content"]
    assert contents.samples(None, None)[1]["bounds"] == [0, 1]
    assert contents.tokens(1, 3, 0)["blocks"].keys() == {"token-samples", "token-values", "turns"}
    with pytest.raises(LookupError, match="no sample 7 of group 3"):
        contents.tokens(1, 3, 7)
    before, *_ = contents.values()
    write_iteration(ledger, 2)
    wait_for(lambda: store.run("toy") and "3 of 3 iterations" in contents.facts()["content"], 60)
    assert contents.values()[0] != before
    store.close()


def test_another_run_of_the_same_name_takes_nothing_of_the_one_before(tmp_path: Path) -> None:
    write_run(new_run(str(tmp_path), training={"lr": 0.0123}), 2)
    with closing(StoreReader(open_store(str(tmp_path)))) as store:
        client = TestClient(Board(store, TOKEN).app())

        def page() -> str:
            return str(client.get("/data/runs/toy/facts").json().get("content"))

        assert "0.0123" in page()
        shutil.rmtree(tmp_path / "runs" / "toy")
        write_run(new_run(str(tmp_path), training={"lr": 0.0456}), 2)
        wait_for(lambda: "0.0456" in page())
        assert "0.0123" not in page()


def test_watch_prints_what_is_done_and_ends_with_the_run(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path))
    write_run(ledger, 2)
    assert ledger.lease is not None
    ledger.lease.release(Outcome.FAILED, FAILURE)
    stopped = cairn("watch", "toy", "--store", tmp_path, "--json")
    first, second, state = map(json.loads, stopped.stdout.splitlines())
    assert [one["iteration"] for one in (first, second)] == [0, 1]
    assert first["reward"] == pytest.approx(2 / 3)
    assert (state["state"], state["iterations"], state["sample"]["reward"]) == ("failed", 2, 1.0)
    assert state["failure"]["commonest"]["count"] == 3
    assert stopped.exit_code == 1
    shown = cairn("watch", "toy", "--store", tmp_path)
    assert "[2/3] iteration 1  reward 0.667" in shown.stdout
    assert "run toy is failed, with 2 of 3 iterations" in shown.stdout
    assert "cairn resume toy --store" in shown.stdout.splitlines()[-2]
