"""Prefect's interface in a real browser: a run is started by its form, its driver killed, and Retry pressed."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from cairn.flows.reading.views import run_status
from cairn.storage.leases import newest_lease
from cairn.storage.store import open_store
from tests.background import Background, in_background
from tests.browser import Visit, visit
from tests.tiny_run import tiny_config
from tests.waiting import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CAIRN = Path(sys.executable).parent / "cairn"
PICTURES = os.environ.get("CAIRN_PICTURES")
"""Folder for pictures of what the test saw: docs/images holds them."""
PATIENCE = 180_000  # milliseconds


@dataclass(frozen=True)
class Operated:
    """`cairn up` in a folder of its own."""

    folder: Path
    url: str

    def ask(self, path: str, **body: Any) -> Any:
        return httpx.post(f"{self.url}/api{path}", json=body, timeout=60).raise_for_status().json()

    def deployment(self, flow: str) -> str:
        found = self.ask("/deployments/filter", flows={"name": {"any_": [flow]}})
        return str(found[0]["id"])

    def flow_runs(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("/flow_runs/filter", flow_runs={"name": {"any_": [name]}})
        return found

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
    with in_background(CAIRN, "up", "--port", "0", cwd=folder) as up:
        yield Operated(folder, url_of(up))
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=120)
    assert up.returncode == 130


def url_of(up: Background) -> str:
    for line in up.stderr:
        if found := re.search(r"UI is at (http://\S+);", line):
            return found[1]
    raise AssertionError("cairn up has ended")


def field(page: "Page", name: str) -> "Locator":
    """What holds one field of the form."""
    label = f"//span[contains(@class,'schema-form-property__label') and normalize-space()='{name}']"
    holder = "ancestor::div[contains(concat(' ',@class,' '),' schema-form-property ')][1]"
    return page.locator(f"xpath={label}/{holder}")


def picture(visited: Visit, name: str) -> None:
    if PICTURES:
        visited.page.wait_for_timeout(3000)  # until what moves has come to rest
        visited.page.screenshot(path=Path(PICTURES) / f"prefect-{name}.png")


def test_a_run_that_was_started_by_the_form_and_killed_ends_by_retry_with_the_undisturbed_digest(
    operated: Operated, browser: "Browser"
) -> None:
    size = {"width": 1280, "height": 900}
    form = f"{operated.url}/deployments/deployment/{operated.deployment('train')}/run"
    with visit(browser, form, viewport=size) as visited:
        page = visited.page
        page.set_default_timeout(PATIENCE)
        options = page.get_by_text("mine.yaml")
        recipe = field(page, "recipe").locator("button.p-select-button__control")
        recipe.wait_for()
        while not options.count():
            recipe.focus()
            page.keyboard.press("ArrowDown")
            page.wait_for_timeout(300)
        options.last.click()
        field(page, "run (Optional)").locator("textarea").fill("killed")
        field(page, "num_rollout (Optional)").locator("input").fill("5")
        field(page, "recipe").scroll_into_view_if_needed()
        picture(visited, "form")
        page.get_by_role("button", name="Submit").click()

        third = operated.folder / "runs/killed/iterations/000002"
        wait_for(third.exists)
        os.kill(operated.driver("killed"), signal.SIGKILL)
        assert not list(third.glob("train*.json")), "it was killed within an iteration"
        (flow_run,) = operated.flow_runs("killed")
        assert flow_run["parameters"]["options"]["rollout"] == {"num_rollout": 5}
        wait_for(lambda: operated.flow_runs("killed")[0]["state_name"] == "Crashed", 90)
        with page.expect_response(re.compile(r"graph-v2")) as graph:
            page.goto(f"{operated.url}/runs/flow-run/{flow_run['id']}")
        page.get_by_text("Crashed").first.wait_for()
        nodes = [node["label"].rpartition(" / ")[2] for _, node in graph.value.json()["nodes"]]
        assert {"killed 000000", "killed 000001", "killed 000002"} <= set(nodes)
        picture(visited, "crashed")

        undisturbed = {"recipe": "recipes/mine.yaml", "run": "undisturbed", "options": {"rollout": {"num_rollout": 5}}}
        page.get_by_role("button", name="Retry").first.click()
        page.get_by_role("button", name="Retry").last.click()
        wait_for(lambda: operated.flow_runs("killed")[0]["state_name"] == "Completed")
        operated.ask(f"/deployments/{operated.deployment('train')}/create_flow_run", parameters=undisturbed)
        page.get_by_text("Completed").first.wait_for()
        picture(visited, "completed")
        (last,) = operated.flow_runs("killed 000004")
        with page.expect_response(re.compile(r"graph-v2")) as graph:
            page.goto(f"{operated.url}/runs/flow-run/{last['id']}")
        steps = {node["label"].rpartition(" / ")[2].split()[0] for _, node in graph.value.json()["nodes"]}
        assert {"rollout", "reward", "filter", "advantage", "train", "sync"} <= steps
        picture(visited, "iteration")
    assert operated.flow_runs("killed")[0]["run_count"] == 2

    wait_for(lambda: [run["state_name"] for run in operated.flow_runs("undisturbed")] == ["Completed"])
    store = open_store(str(operated.folder))
    killed, whole = run_status(store, "killed"), run_status(store, "undisturbed")
    assert (killed.iterations, killed.driver and killed.driver.epoch) == (5, 2)
    assert killed.state_digest == whole.state_digest
