"""Prefect's interface in a real browser: a run is started by its form, its driver killed, and Retry pressed."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from cairn.flows.reading.views import run_status
from cairn.storage.ledger.leases import newest_lease
from cairn.storage.opening import open_store
from tests.background import Background, in_background
from tests.browser import Visit, visit
from tests.flows.evaluation.test_comparing import result
from tests.tiny_run import tiny_config
from tests.waiting import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CAIRN = Path(sys.executable).parent / "cairn"
PICTURES = os.environ.get("CAIRN_PICTURES")
"""Folder for pictures of what the test saw: docs/images holds them."""
PATIENCE = 180_000  # milliseconds


@dataclass(frozen=True)
class Operated:
    """`cairn up` in a folder of its own."""

    folder: Path
    url: str
    board: str
    """Address of the board with its token."""

    def ask(self, path: str, **body: Any) -> Any:
        return httpx.post(f"{self.url}/api{path}", json=body, timeout=60).raise_for_status().json()

    def deployment(self, flow: str) -> str:
        found = self.ask("/deployments/filter", flows={"name": {"any_": [flow]}})
        return str(found[0]["id"])

    def flow_runs(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("/flow_runs/filter", flow_runs={"name": {"any_": [name]}})
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        """Those that the server has received."""
        found: list[dict[str, Any]] = self.ask("/events/filter", filter={"event": {"name": [name]}})["events"]
        return found

    def command(self, program: str, *arguments: str) -> str:
        environment = os.environ | {"PREFECT_API_URL": f"{self.url}/api"}
        command = [str(CAIRN.with_name(program)), *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=environment, check=True, capture_output=True, text=True, timeout=120
        )
        return done.stdout + done.stderr

    def driver(self, run: str) -> int:
        lease = newest_lease(open_store(str(self.folder)), run)
        assert lease is not None
        return lease.holder.pid


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory, tiny_assets: Path) -> Iterator[Operated]:
    folder = tmp_path_factory.mktemp("operated")
    (folder / "recipes").mkdir()
    config = tiny_config(tiny_assets, rollout={"num_rollout": 3}, checkpoint={"save_interval": 2})
    (folder / "recipes" / "mine.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    gated = tiny_config(tiny_assets, rollout={"num_rollout": 2}, approval={"before": [1], "wait": False})
    (folder / "recipes" / "gated.yaml").write_text(yaml.safe_dump(gated.model_dump(mode="json")))
    # Of its events an embedded server keeps none by itself.
    stored = {"PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "true"}
    with in_background(CAIRN, "up", "--port", "0", cwd=folder, **stored) as up:
        board = url_of(up, r"board is at (http://\S+)")
        yield Operated(folder, url_of(up, r"UI is at (http://\S+);"), board)
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=120)
    assert up.returncode == 130


def url_of(up: Background, pattern: str) -> str:
    for line in up.stderr:
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError("cairn up has ended")


def nodes_on_page(page: "Page", url: str) -> set[str]:
    """Open the page of a flow run, and return the names of what its graph shows."""
    page.goto("about:blank")  # the page before asks for its own graph again and again
    with page.expect_response(re.compile(r"graph-v2")) as graph:
        page.goto(url)
    return {node["label"].rpartition(" / ")[2] for _, node in graph.value.json()["nodes"]}


def picture(visited: Visit, name: str, *, whole: bool = False) -> None:
    if PICTURES:
        visited.page.wait_for_timeout(3000)  # until what moves has come to rest
        visited.page.screenshot(path=Path(PICTURES) / f"prefect-{name}.png", full_page=whole)


def kill_within_an_iteration(driver: int, iterations: list[Path]) -> None:
    """It is stopped while one looks where it is, and goes on if it has just trained: another iteration will do."""
    for iteration in iterations:
        while not iteration.exists():
            time.sleep(0.01)
        os.kill(driver, signal.SIGSTOP)
        if not list(iteration.glob("train*.json")):
            os.kill(driver, signal.SIGKILL)
            return
        os.kill(driver, signal.SIGCONT)
    raise AssertionError("all iterations had been trained before it could be killed")


@pytest.mark.proof
def test_a_run_that_was_started_by_the_form_and_killed_ends_by_retry_with_the_undisturbed_digest(
    operated: Operated, browser: "Browser"
) -> None:
    size = {"width": 1280, "height": 900}
    form = f"{operated.url}/v2/deployments/deployment/{operated.deployment('train')}/run"
    with visit(browser, form, viewport=size) as visited:
        page = visited.page
        page.set_default_timeout(PATIENCE)
        page.get_by_label("Select recipe").click()
        page.get_by_role("option", name="mine", exact=True).click()
        page.get_by_label("run (Optional)", exact=True).fill("killed")
        page.get_by_label("rollout.num_rollout (Optional)").fill("5")
        page.get_by_label("set (Optional)").fill("training.lr=0.002\nseed=7")
        assert page.evaluate("document.documentElement.scrollHeight") < 2.5 * size["height"]
        picture(visited, "form", whole=True)
        page.get_by_role("button", name="Submit").click()

        iterations = operated.folder / "runs/killed/iterations"
        wait_for((iterations / "000002").exists)
        kill_within_an_iteration(operated.driver("killed"), [iterations / f"{i:06}" for i in (2, 3, 4)])
        (flow_run,) = operated.flow_runs("killed")
        assert flow_run["parameters"]["options"] == {"rollout.num_rollout": 5}
        wait_for(lambda: operated.flow_runs("killed")[0]["state_name"] == "Crashed", 90)
        nodes = nodes_on_page(page, f"{operated.url}/v2/runs/flow-run/{flow_run['id']}")
        assert {"killed 000000", "killed 000001", "killed 000002"} <= nodes
        page.get_by_text("Crashed").first.wait_for()
        picture(visited, "crashed")

        undisturbed = {
            "recipe": "mine",
            "run": "undisturbed",
            "options": {"rollout.num_rollout": 5},
            "set": "training.lr=0.002\nseed=7",
        }
        page.get_by_role("button", name="Open menu").click()
        page.get_by_role("menuitem", name="Retry").click()
        page.get_by_role("button", name="Retry").click()
        wait_for(lambda: operated.flow_runs("killed")[0]["state_name"] == "Completed")
        operated.ask(f"/deployments/{operated.deployment('train')}/create_flow_run", parameters=undisturbed)
        page.get_by_text("Completed").first.wait_for()
        page.reload()  # the page asks for no more logs once a run has ended, and the last ones come after its state
        page.get_by_role("tab", name="Logs").click()
        page.get_by_text(re.compile(r"Iteration 4: reward 0\.\d+, [\d.]+ tokens a response, ")).wait_for()
        page.get_by_role("tab", name="Artifacts").click()
        curve = page.get_by_role("img", name="curve")
        wait_for(lambda: curve.last.evaluate("image => image.naturalWidth") > 0)
        page.get_by_text("5 of 5 iterations, reward").first.wait_for()
        picture(visited, "completed", whole=True)
        (last,) = operated.flow_runs("killed 000004")
        steps = {node.split()[0] for node in nodes_on_page(page, f"{operated.url}/v2/runs/flow-run/{last['id']}")}
        assert {"rollout", "reward", "filter", "advantage", "train", "sync"} <= steps
        picture(visited, "iteration")
    assert operated.flow_runs("killed")[0]["run_count"] == 2

    wait_for(lambda: [run["state_name"] for run in operated.flow_runs("undisturbed")] == ["Completed"])
    store = open_store(str(operated.folder))
    killed, whole = run_status(store, "killed"), run_status(store, "undisturbed")
    assert (killed.iterations, killed.driver and killed.driver.epoch) == (5, 2)
    assert killed.state_digest == whole.state_digest


def test_the_board_starts_a_fork_and_cancels_it_and_prefect_shows_both(operated: Operated) -> None:
    parameters = {"recipe": "mine", "run": "forked"}
    operated.ask(f"/deployments/{operated.deployment('train')}/create_flow_run", parameters=parameters)
    wait_for(lambda: [run["state_name"] for run in operated.flow_runs("forked")] == ["Completed"])
    address, _, token = operated.board.partition("/#token=")
    (page, *_) = operated.ask(
        "/artifacts/filter", artifacts={"key": {"like_": "run-forked"}, "type": {"any_": ["markdown"]}}
    )
    for text in (page["data"], page["description"]):
        assert f"({address}/runs/forked)" in text
    for deployment in operated.ask("/deployments/filter"):
        assert f"({address}/)" in deployment["description"]

    def act(run: str, action: str, **given: str) -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.post(f"{address}/data/runs/{run}/{action}", json=given, headers=headers, timeout=60)

    options = "rollout.num_rollout=500"
    made = act("forked", "fork", iteration="1", name="branch", options=options)
    assert made.json() == {"sentence": "branch shares iterations 0 to 1 of forked. Prefect starts it.", "run": "branch"}
    wait_for((operated.folder / "runs/branch/iterations/000003").exists)
    assert "Prefect cancels" in act("branch", "cancel").json()["sentence"]
    wait_for(lambda: [run["state_name"] for run in operated.flow_runs("branch")] == ["Cancelled"])
    assert act("branch", "cancel").status_code == 400


AUTOMATION = """
name: verify what waits for approval
trigger:
  type: event
  posture: Reactive
  expect: [cairn.approval.requested]
  for_each: ["prefect.resource.id"]
  threshold: 1
actions:
  - type: run-deployment
    source: selected
    deployment_id: {deployment}
    parameters:
      run: "{{{{ event.payload.run }}}}"
"""


def test_a_run_at_a_gate_ends_paused_tells_prefect_and_goes_on_when_it_is_approved(operated: Operated) -> None:
    verify = operated.deployment("verify")
    (operated.folder / "automation.yaml").write_text(AUTOMATION.format(deployment=verify))
    operated.command("prefect", "automation", "create", "--from-file", "automation.yaml")
    parameters = {"recipe": "gated", "run": "gated", "restarts": 3}
    made = operated.ask(f"/deployments/{operated.deployment('train')}/create_flow_run", parameters=parameters)["id"]

    def train() -> list[Any]:
        return [run for run in operated.flow_runs("gated") if run["id"] == made]

    def wait(state: str, kind: str) -> dict[str, Any]:
        wait_for(lambda: [(run["state_name"], run["state_type"]) for run in train()] == [(state, kind)])
        return dict(train()[0])

    paused = wait("AwaitingApproval", "PAUSED")
    assert "cairn approve gated@1" in paused["state"]["message"]
    (iteration,) = operated.flow_runs("gated 000001")
    assert (iteration["state_name"], iteration["state_type"]) == ("AwaitingApproval", "CANCELLED")
    lease = newest_lease(open_store(str(operated.folder)), "gated")
    assert lease is not None
    assert lease.is_over()

    (event,) = wait_for(lambda: operated.events("cairn.approval.requested"))
    assert (event["payload"]["iteration"], event["payload"]["approve"]) == (1, "cairn approve gated@1")
    verified = wait_for(lambda: [run for run in operated.flow_runs("gated") if run["deployment_id"] == verify])
    assert verified[0]["created_by"]["type"] == "AUTOMATION"

    operated.command("cairn", "reject", "gated")
    operated.ask(f"/flow_runs/{made}/resume")
    rejected = wait("Rejected", "CANCELLED")
    assert "Run gated was rejected before iteration 1" in rejected["state"]["message"]
    assert rejected["run_count"] == 1, "a Resume does not count, being started again by itself would"

    operated.command("cairn", "approve", "gated")
    retry = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
    operated.ask(f"/flow_runs/{made}/set_state", state=retry, force=False)
    assert wait("Completed", "COMPLETED")["run_count"] == 2


def test_a_regression_reaches_prefect_as_an_event(operated: Operated) -> None:
    store = open_store(str(operated.folder))
    result(store, "before", [1.0] * 60)
    result(store, "after", [0.0] * 60)
    assert "worse against before" in operated.command("cairn", "leaderboard", "--baseline", "before")
    (event,) = wait_for(lambda: operated.events("cairn.evaluation.regressed"))
    assert (event["payload"]["model"], event["payload"]["difference"]) == ("after", -1.0)
