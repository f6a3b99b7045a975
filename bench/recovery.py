"""Downtime of a killed run: from SIGKILL of its driver to the next new commit, split by cause.

    python -m bench.recovery [RECIPE] [--outlived] [--set a.b=c] [--rounds 3] [--smoke] [--json FILE]

A driver with its own Prefect server and Ray cluster is killed just after a train step was committed; its weights are
lost with its engines. Its successor, started at once as by `cairn resume`, restores them for the next step, `sync`.
With `--outlived`, server and cluster do not belong to the driver; the successor finds them, and the engines on the
cluster with their state. The round ends with the commit of that step. One after the other:

    Python      the interpreter, and importing Cairn, PyTorch's tokenizers, Prefect and Ray
    open        checks of store, model and data; acquiring the lease; starting graders
    Prefect     further, until the server responds
    engines     further, until all engines are up
    restore     checkpoint loaded, committed train steps replayed
    step        the rest: Prefect's overhead at the start of a run and an iteration, and the step itself

Ray and the engines start concurrently with the rest; the duration of each start by itself is reported too.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench.command import SMALL_RUN, parse, say
from tests.ray_fixtures import ray_head

DEADLINE = 600.0
"""Seconds that one driver may take to the expected commit."""


def drive(store: str, run: str, recipe: str, overrides: list[str]) -> None:
    """Resume the run, and print every mark as a line of JSON. Runs in the driver's process."""
    mark("start", at=psutil.Process().create_time())
    from cairn.configs.loader import load
    from cairn.engines.fleet import warm
    from cairn.engines.processes.deferred import collecting_later, defer_compiler

    config = load(recipe, overrides)
    defer_compiler()  # as `cairn resume` does, like the rest
    warm.prepare(config)
    with collecting_later():
        from cairn.flows.orchestration.server import prepare_server

        prepare_server(Path(store) / "prefect")
        import cairn.flows.train
    from cairn.engines.fleet.cluster import Cluster
    from cairn.engines.fleet.fleet import Fleet
    from cairn.flows.events import Event, RunStarted
    from cairn.flows.orchestration.server import Server
    from cairn.storage.opening import open_for_runs
    from cairn.tasks.durable.events import StepCommitted

    mark("Python")
    span(cairn.flows.train, "open_run", "open", enters=True)
    span(Server, "wait_ready", "Prefect")
    span(Cluster, "open", "ray", is_static=True)
    span(Fleet, "start", "fleet", is_static=True)
    span(sys.modules["cairn.tasks.trainer.sync"], "restore_trainer", "restore")

    def on_event(event: Event) -> None:
        if isinstance(event, RunStarted):
            mark("engines")
        elif isinstance(event, StepCommitted) and not event.adopted:
            mark(event.commit.name)

    cairn.flows.train.PREFECT_HOME = Path(store) / "prefect"
    cairn.flows.train.start(open_for_runs(store), run, config, on_event=on_event)


_saying = threading.Lock()


def mark(name: str, at: float | None = None, **more: float) -> None:
    line = json.dumps({"mark": name, "at": at or time.time(), **more})
    with _saying:  # threads of the driver do
        print(line, flush=True)


def span(owner: Any, name: str, label: str, *, is_static: bool = False, enters: bool = False) -> None:
    """Mark the end of every call of a function, with its seconds; `enters`: of entering the context manager that it
    returns."""
    function: Callable[..., Any] = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.time()
        result = function(*args, **kwargs)
        mark(label, seconds=time.time() - began)
        return result

    @contextmanager
    def entered(*args: Any, **kwargs: Any) -> Iterator[Any]:
        began = time.time()
        with function(*args, **kwargs) as value:
            mark(label, seconds=time.time() - began)
            yield value

    setattr(owner, name, entered if enters else staticmethod(timed) if is_static else timed)


class Driver:
    """A driver process whose marks are read."""

    def __init__(self, arguments: list[str], api_url: str | None) -> None:
        command = [sys.executable, "-m", "bench.recovery", "--drive", *arguments]
        environment = {**os.environ, "PREFECT_LOGGING_LEVEL": "CRITICAL"}
        environment.pop("PREFECT_API_URL", None)
        if api_url is not None:
            environment["PREFECT_API_URL"] = api_url
        self.api_url = api_url
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.marks: dict[str, dict[str, float]] = {}

    def until(self, wanted: Callable[[str], bool]) -> float:
        """Read marks up to the first wanted one; return its time."""
        end = time.monotonic() + DEADLINE
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = json.loads(line)
            self.marks.setdefault(found["mark"], found)
            if wanted(found["mark"]):
                return float(found["at"])
            if time.monotonic() > end:
                break
        self.kill()
        sys.exit("a driver did not come to the commit that was waited for; its message stands above")

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the process itself."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def kill(self) -> float:
        """Send SIGKILL; return the time."""
        at = time.time()
        self._process.send_signal(signal.SIGKILL)
        return at

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def one_round(arguments: list[str], driver: Driver) -> tuple[dict[str, float], dict[str, float], Driver]:
    """Kill a driver after its next train step, and time its successor. Return the consecutive seconds, the seconds of
    each start by itself, and the successor."""
    driver.until(lambda name: name.endswith("/train"))
    killed = driver.kill()
    successor = Driver(arguments, driver.api_url)
    driver.close()
    committed = successor.until(lambda name: "/" in name)
    computed = successor.cpu_seconds()
    marks = successor.marks
    shares, before = {}, killed
    for name in [name for name in ("Python", "open", "Prefect", "engines") if name in marks]:
        shares[name] = max(0.0, marks[name]["at"] - before)
        before = max(before, marks[name]["at"])
    restore = marks.get("restore", {}).get("seconds", 0.0)
    shares |= {"restore": restore, "step": committed - before - restore, "all": committed - killed}
    alone = {name: marks[mark]["seconds"] for name, mark in (("Prefect", "Prefect"), ("Ray", "ray")) if mark in marks}
    alone["engines"] = marks["fleet"]["seconds"] - alone["Ray"]
    alone["CPU time of the driver itself"] = computed
    return shares, alone, successor


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="configs/recipes/quickstart.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override an option")
    parser.add_argument("--outlived", action="store_true", help="by a Prefect server and a Ray cluster of others")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drive", metavar="STORE", help=argparse.SUPPRESS)
    arguments = parse(parser, rounds=1)
    small = SMALL_RUN if arguments.smoke else ()
    overrides = ["tracking.tensorboard_dir=null", *small, *arguments.set]
    if arguments.drive:
        drive(arguments.drive, "recovery", arguments.recipe, overrides)
        return
    shares, alone = defaultdict(list), defaultdict(list)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        words = [folder, arguments.recipe, *(word for option in arguments.set for word in ("--set", option))]
        words += ["--smoke"] if arguments.smoke else []
        api_url = None
        if arguments.outlived:
            from cairn.flows.orchestration.server import Server

            server = Server(Path(folder) / "prefect")
            stack.callback(server.stop)
            server.wait_ready()
            api_url = server.api_url
            os.environ["RAY_AUTH_MODE"] = "disabled"  # a token would have to be in the home folder
            words += ["--set", f"fleet.ray_address={stack.enter_context(ray_head())}"]
        driver = Driver(words, api_url)
        try:
            for turn in range(arguments.rounds):
                say(f"round {turn + 1} of {arguments.rounds}")
                one_share, one_alone, driver = one_round(words, driver)
                for name, seconds in one_share.items():
                    shares[name].append(seconds)
                for name, seconds in one_alone.items():
                    alone[name].append(seconds)
        finally:
            driver.close()
    whole = statistics.median(shares["all"])
    table = Table("", "median s", "range", "share", title="from SIGKILL to the next commit")
    for name, seconds in shares.items():
        median = statistics.median(seconds)
        table.add_row(
            name, f"{median:.1f}", f"{min(seconds):.1f} – {max(seconds):.1f}", f"{100 * median / whole:.0f} %"
        )
    console = Console()
    console.print(table)
    starts = ", ".join(f"{name} {statistics.median(seconds):.1f} s" for name, seconds in alone.items())
    console.print(f"each start by itself: {starts}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"seconds": dict(shares), "starts": dict(alone)}, indent=1))


if __name__ == "__main__":
    main()
