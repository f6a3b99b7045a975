"""How soon the board shows what there is and what is new, and what a viewer costs a driver on the same machine.

  python -m bench.board [--runs 100] [--iterations 60] [--recipe FILE] [--smoke] [--json FILE]

first paint   of the page of `--runs` runs of ten iterations, from a board that has just started, and from one that
              has read them; then until every run has its curve
shown         from the last commit of an iteration until the run's page says so, in headless Chromium
driver        seconds of an iteration of a recipe, while a viewer asks as a page does and while none does: every five
              iterations one begins or ends, so that both see the same machine
"""

import argparse
import itertools
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from bench.command import parse, say
from bench.durable_run import CAIRN, DEADLINE, RUN
from cairn.configs.loader import from_manifest
from cairn.flows.reading.metrics import iteration_metrics
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.storage.store import canonical
from tests.browser import executable
from tests.flows.written_runs import new_run, write_iteration, write_run

BLOCK = 5
"""Number of iterations with a viewer, and then without one."""
EVERY = 0.4
"""Seconds between two questions of a page."""


@contextmanager
def board(store: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the address of a board in a process of its own, and the process."""
    store.mkdir(exist_ok=True)
    command = [CAIRN, "board", "--port", "0", "--store", str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = line.rpartition(" ")[2].partition("#")[0].rstrip("/")
            while True:
                try:
                    httpx.get(f"{url}/favicon.ico")
                    break
                except httpx.TransportError:
                    if process.poll() is not None:
                        raise RuntimeError(f"cairn board ended with {process.returncode}") from None
                    time.sleep(0.02)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser."""
    from playwright.sync_api import sync_playwright

    program, environment = executable()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox"], env={**os.environ, **environment}, timeout=60_000
        )
        yield browser
        browser.close()


def write_runs(store: Path, count: int) -> None:
    """Write a run, and copies of it under other names."""
    write_run(new_run(str(store), "run-000", rollout={"num_rollout": 10}), 10)
    folder = store / "runs"
    for number, file in itertools.product(range(1, count), sorted((folder / "run-000").rglob("*.json"))):
        fields = canonical.unseal(file.read_bytes())
        name = f"run-{number:03d}"
        target = folder / name / file.relative_to(folder / "run-000")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(canonical.seal(fields | ({"run": name} if "run" in fields else {})))


def paint(browser: Any, url: str, runs: int) -> dict[str, float]:
    """Return the seconds until the first paint, until all runs are listed, and until all have their curves."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    began = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.locator("#runs-count").get_by_text(f"of {runs} runs").wait_for()
    listed = time.perf_counter() - began
    while any(not row["curve"]["values"] for row in httpx.get(f"{url}/data/runs").json()["runs"]):
        time.sleep(0.02)
    read = time.perf_counter() - began
    first = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
    page.close()
    return {"first_paint": first, "listed": listed, "curves": read}


def shown(browser: Any, url: str, ledger: Ledger, iterations: int) -> list[float]:
    """Return the seconds from the last commit of each iteration until the page says that the iteration is complete."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"{url}/runs/{ledger.run}")
    page.locator("html[data-state=ready]").wait_for(state="attached")
    seconds = []
    for number in range(2, 2 + iterations):
        (*_, last) = write_iteration(ledger, number)
        at = page.evaluate(
            f"""() => new Promise((done) => {{ const look = () => document.querySelector("#overview .lead").textContent
                .startsWith("{number + 1} of") ? done(Date.now() / 1000) : setTimeout(look, 5); look() }})"""
        )
        seconds.append(at - last.committed_at)
    page.close()
    return seconds


class Viewer(threading.Thread):
    """Asks a board for a run as its page does, while `looks` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.looks, self.over = threading.Event(), threading.Event()
        self._paths = {f"{url}/data/runs/{RUN}/{part}": "" for part in ("facts", "samples")}

    def run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self.over.wait(EVERY):
                for path, tag in self._paths.items() if self.looks.is_set() else ():
                    answer = client.get(path, headers={"If-None-Match": tag})
                    self._paths[path] = answer.headers.get("ETag", tag)


def driver(recipe: str, words: list[str], store: Path, iterations: int) -> dict[str, Any]:
    """Return the seconds of each iteration with a viewer and without one, and the board's share of a core meanwhile."""
    command = [CAIRN, "train", recipe, "--run", RUN, "--store", str(store), *words]
    command += ["--set", f"rollout.num_rollout={iterations}"]
    folder = store / "runs" / RUN / "iterations"
    used, viewed, since = 0.0, 0.0, (0.0, 0.0)
    with board(store) as (url, process), subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
        viewer = Viewer(url)
        viewer.start()
        for first in range(BLOCK, iterations, BLOCK):
            while not (folder / f"{first:06d}").exists():
                if run.poll() is not None:
                    raise RuntimeError(f"cairn train ended with {run.returncode}")
                time.sleep(0.02)
            now = sum(process.cpu_times()[:2]), time.monotonic()
            if viewer.looks.is_set():
                used, viewed = used + now[0] - since[0], viewed + now[1] - since[1]
                viewer.looks.clear()
            else:
                viewer.looks.set()
            since = now
        run.wait(DEADLINE)
        viewer.over.set()
        viewer.join()
    ledger = Ledger.open(open_store(str(store)), RUN)
    config = from_manifest(ledger.manifest.config)
    seconds: dict[str, list[float]] = {"viewed": [], "alone": []}
    for number in range(BLOCK, iterations):
        # The first iteration of a block is partly the other's, and one with a checkpoint is longer.
        metrics = iteration_metrics(ledger.commits(number), config)
        if number % BLOCK and "perf/save_model_time" not in metrics:
            seconds["viewed" if number // BLOCK % 2 else "alone"].append(metrics["perf/step_time"])
    return {"seconds": seconds, "board_cores": used / viewed if viewed else 0.0}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=60, help="of the driver")
    parser.add_argument("--recipe", default="configs/recipes/quickstart.yaml")
    parser.add_argument("--set", action="append", default=[], help="an option of the recipe")
    options = parse(parser, runs=3, iterations=20)
    with tempfile.TemporaryDirectory() as scratch:
        many, few = Path(scratch, "many"), Path(scratch, "few")
        write_runs(many, options.runs)
        working = new_run(str(few), "working", rollout={"num_rollout": 500})
        write_run(working, 2)
        with chromium() as browser:
            say("runs are written; opening them")
            with board(many) as (url, _):
                cold, warm = paint(browser, url, options.runs), paint(browser, url, options.runs)
            say("writing iterations")
            with board(few) as (url, _):
                late = shown(browser, url, working, 3 if options.smoke else 30)
        say("training")
        words = [word for given in options.set for word in ("--set", given)]
        cost = driver(options.recipe, words, Path(scratch, "driven"), options.iterations)
    viewed, alone = (median(cost["seconds"][name]) for name in ("viewed", "alone"))
    print(f"{options.runs} runs: first paint after {cold['first_paint']:.2f} s, {warm['first_paint']:.2f} s again; ")
    print(f"listed after {cold['listed']:.2f} s, with all curves after {cold['curves']:.2f} s")
    print(f"an iteration is shown {median(late):.2f} s after its last commit, {max(late):.2f} s at most")
    print(
        f"an iteration of the driver: {alone:.3f} s, {viewed:.3f} s with a viewer: {100 * (viewed / alone - 1):+.1f} %"
    )
    print(f"the board meanwhile: {cost['board_cores']:.2f} cores")
    if options.json:
        found = {"cold": cold, "warm": warm, "shown": late, "driver": cost}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
