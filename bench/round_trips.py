"""Fixed time of an iteration: a driver's calls to Prefect, to Ray's actors and to its store, one by one.

    python -m bench.round_trips [RECIPE] [--set a.b=c] [--iterations 20] [--smoke] [--json FILE]

Runs a durable run as `cairn train` does, in this process. For each kind of call it counts the calls of an iteration,
and measures the milliseconds from request to response, including the requested work. Concurrent calls of a store each
count in full. Counts do not depend on the machine's other load; compare those first. `python -m bench.durability`
measures the total cost.
"""

import argparse
import json
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import httpx
import ray
from rich.console import Console
from rich.table import Table

from bench.command import SMALL_RUN, parse, say
from cairn.configs.loader import load
from cairn.engines.fleet.calls import Deadline
from cairn.engines.fleet.fencing import Callee
from cairn.engines.fleet.handles import Call
from cairn.flows.events import Event
from cairn.flows.train import start
from cairn.storage.ledger.commits import Step
from cairn.storage.opening import open_for_runs
from cairn.storage.store.local import LocalStore
from cairn.tasks.durable.events import StepCommitted

WARM_UP = 3
"""Number of iterations at each end that are not counted."""

STORE = ("read", "read_many", "write", "create", "exists", "list", "page", "find", "delete")
_FILES = {
    r"/leases(/|$)": "leases",
    r"/write_ahead(/|$)": "write-ahead parts",
    r"/iterations/\d+/\w+(/|$)": "attempts",
    r"/iterations/\d+": "commits",
}
"""Kinds of files of a run, by a part of their paths."""

_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}")


class Calls:
    """Calls by target and kind, while counting is on. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[str, float] = {}
        self.counting = False
        self.milliseconds: dict[tuple[str, str], list[float]] = {}

    def add(self, whom: str, what: str, began: float) -> None:
        """Add a call that has ended."""
        if self.counting:
            with self._lock:
                self.milliseconds.setdefault((whom, what), []).append(1e3 * (time.perf_counter() - began))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Intercept every call of this process while the block runs."""
        original, original_async = httpx.Client.send, httpx.AsyncClient.send
        submit, wait = Callee.call, Call.result
        calls = self

        def send(client: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
            began = time.perf_counter()
            response = original(client, request, **options)
            calls.add("Prefect", _of(request), began)
            return response

        async def send_async(client: httpx.AsyncClient, request: httpx.Request, **options: Any) -> httpx.Response:
            began = time.perf_counter()
            response = await original_async(client, request, **options)
            calls.add("Prefect", _of(request), began)
            return response

        def call(callee: Callee, method: Any, *args: Any, **kwargs: Any) -> Any:
            began, ref = time.perf_counter(), submit(callee, method, *args, **kwargs)
            for one in ref if isinstance(ref, list) else [ref]:
                if isinstance(one, ray.ObjectRef):  # a stream is no one call
                    calls._begun[one.hex()] = began
            return ref

        def result(sent: "Call[Any]", deadline: Deadline | None = None) -> Any:
            began = calls._begun.pop(sent.ref.hex(), time.perf_counter())
            found = wait(sent, deadline)
            calls.add("Ray", f"{sent.engine.name} {sent.method}", began)
            return found

        with ExitStack() as stack:
            stack.enter_context(patch.object(httpx.Client, "send", send))
            stack.enter_context(patch.object(httpx.AsyncClient, "send", send_async))
            stack.enter_context(patch.object(Callee, "call", call))
            stack.enter_context(patch.object(Call, "result", result))
            for name in STORE:
                stack.enter_context(patch.object(LocalStore, name, self._timed(name, getattr(LocalStore, name))))
            yield

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.add("store", f"{name} {_files(str(args[1]))}", began)

        return timed


def _of(request: httpx.Request) -> str:
    return f"{request.method} {_ID.sub('ID', request.url.path.removeprefix('/api'))}"


def _files(path: str) -> str:
    return next((kind for part, kind in _FILES.items() if re.search(part, path)), "others")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="configs/recipes/quickstart.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override an option")
    parser.add_argument("--iterations", type=int, default=20, help="iterations, the first and last three do not count")
    arguments = parse(parser, iterations=2 * WARM_UP + 1)
    small = SMALL_RUN if arguments.smoke else ()
    overrides = [f"rollout.num_rollout={arguments.iterations}", "tracking.tensorboard_dir=null", *small, *arguments.set]
    config, calls = load(arguments.recipe, overrides), Calls()

    def tell(event: Event) -> None:
        if isinstance(event, StepCommitted) and event.commit.step is Step.TRAIN:
            say(f"iteration {event.commit.iteration}")
            calls.counting = WARM_UP <= event.commit.iteration < arguments.iterations - WARM_UP

    with tempfile.TemporaryDirectory() as folder, calls.counted():
        start(open_for_runs(folder), "counted", config, on_event=tell)
    counted = arguments.iterations - 2 * WARM_UP
    table = Table("whom", "what", "an iteration", "ms an iteration")
    for (whom, what), times in sorted(calls.milliseconds.items(), key=lambda one: (one[0][0], -sum(one[1]))):
        table.add_row(whom, what, f"{len(times) / counted:.1f}", f"{sum(times) / counted:.1f}")
    Console().print(table)
    if arguments.json is not None:
        found = {" ".join(name): times for name, times in calls.milliseconds.items()}
        arguments.json.write_text(json.dumps({"iterations": counted, "milliseconds": found}, indent=1))


if __name__ == "__main__":
    main()
