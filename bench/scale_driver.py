"""One driver of `bench.scale`, in a process of its own: a run with synthetic engines, measured from inside.

    python -m bench.scale_driver OPTIONS        a JSON object; results go to the file that it names

PYTHONPATH says of which checkout the code is that this file imports.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from bench import store_counts, synthetic_engines
from bench.cpu import DRIVER, Processes
from cairn.configs.loader import parse
from cairn.engines.fleet.fencing import Callee
from cairn.engines.fleet.fleet import Fleet
from cairn.flows.driver.sources import Sources, open_graders
from cairn.flows.events import Event, IterationDone, RunStarted
from cairn.flows.iteration import plan_round
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_for_runs, open_store
from cairn.tasks.durable.events import StepCommitted, StepStarted
from cairn.tasks.evaluation.evaluate import evaluate
from cairn.tasks.generation.rollout import rollout
from cairn.tasks.steps import rules

KILLED = 9
"""Exit status of a driver that ends as if it had been killed: after some iterations, or before the first step that it
executes of a run that it resumes."""


class Memory:
    """The most memory that this process has had at a time, in bytes."""

    def __init__(self) -> None:
        self._anonymous = 0
        threading.Thread(target=self._watch, daemon=True).start()
        self.reset()

    def reset(self) -> None:
        """Measure from now on."""
        self._anonymous = 0
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> dict[str, int]:
        """Return the peak of all resident memory, with pages of Ray's object store, and of private memory alone."""
        self._look()
        return {"resident": _status("VmHWM"), "private": self._anonymous}

    def now(self) -> int:
        """Return the private memory."""
        return _status("RssAnon")

    def _watch(self) -> None:
        while True:
            self._look()
            time.sleep(0.05)

    def _look(self) -> None:
        self._anonymous = max(self._anonymous, self.now())


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


class Calls:
    """Calls of actors that this process makes, by method. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        original = Callee.call

        def call(callee: Callee, method: Any, *args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._counts[method.__name__] += 1
            return original(callee, method, *args, **kwargs)

        Callee.call = call  # type: ignore[method-assign]

    def all(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class Measured:
    """Cumulative values at a moment, and their differences."""

    def __init__(self, counts: Path, calls: Calls, processes: Processes) -> None:
        self._counts, self._calls, self._processes = counts, calls, processes
        self._ended: dict[int, float] = {}
        self._own = 0.0
        """CPU seconds of the measurements."""

    def look(self) -> dict[str, Any]:
        began = time.thread_time()
        requests: dict[str, int] = {}
        written = {DRIVER: 0, "others": 0}
        for pid, rows in store_counts.read(self._counts).items():
            whose = DRIVER if pid == os.getpid() else "others"
            for name, (count, size) in rows.items():
                requests[f"{whose} {name}"] = requests.get(f"{whose} {name}", 0) + count
                written[whose] += size
        self._ended |= self._processes.look()
        cpu: dict[str, float] = {}
        for pid, seconds in self._ended.items():
            role = self._processes.roles[pid]
            cpu[role] = cpu.get(role, 0.0) + seconds
        self._own += time.thread_time() - began
        cpu[DRIVER] = time.process_time() - self._own
        return {
            "wall": time.perf_counter(),
            "requests": requests,
            "written": written,
            "calls": self._calls.all(),
            "cpu": cpu,
        }


def difference(later: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Return what two looks differ by."""
    found: dict[str, Any] = {}
    for name, value in later.items():
        if isinstance(value, dict):
            found[name] = {key: value[key] - earlier[name].get(key, 0) for key in value}
            found[name] = {key: value for key, value in found[name].items() if value}
        else:
            found[name] = value - earlier[name]
    return found


class Watch:
    """Measures a run from its events."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._end_after: int | None = options.get("end_after")
        self._resumes: bool = options.get("resume", False)
        self._results = Path(options["results"])
        self.memory, calls = Memory(), Calls()
        self._measured = Measured(Path(os.environ[store_counts.FOLDER]), calls, Processes(os.getpid()))
        self._last = self._began = self._measured.look()
        self._lock = threading.Lock()
        self._steps: dict[str, list[float]] = {}
        """First start, last end, CPU seconds then and then, of each step of the current iteration."""
        self._waits: list[tuple[float, float]] = []
        self._opened = False
        self._iteration = 0
        self.found: dict[str, Any] = {"iterations": []}

    def __call__(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, RunStarted):
                self.found["start"] = self._since(self._began) | {"private": self.memory.now()}
                self.begin(event.iteration)
            elif isinstance(event, StepStarted):
                self._start(event)
            elif isinstance(event, StepCommitted) and event.commit.step in self._steps:
                self._steps[event.commit.step][1::2] = time.perf_counter(), time.process_time()
            elif isinstance(event, IterationDone):
                self.end(event.iteration)
                if self._end_after is not None and event.iteration + 1 >= self._end_after:
                    os._exit(KILLED)

    def waited(self, began: float) -> None:
        """Count the seconds from `began` until now as a wait for engines or for Prefect's server."""
        self._waits.append((began, time.perf_counter()))

    def _start(self, event: StepStarted) -> None:
        if not self._opened:
            self._opened = True
            self.found["to_first_step"] = self._since(self._began)
            self.found["to_first_step"]["waited"] = sum(end - start for start, end in self._waits)
            if self._resumes:
                self.save()
                os._exit(KILLED)
        if event.iteration > self._iteration:  # an iteration begins before the one before it is reported to be done
            self.end(self._iteration)
        now = time.perf_counter(), time.process_time()
        self._steps.setdefault(event.step, [now[0], now[0], now[1], now[1]])

    def end(self, iteration: int) -> None:
        """Record an iteration, unless that has been done."""
        if iteration != self._iteration:
            return
        one = self._since(self._last)
        one["iteration"] = iteration
        one["peak"] = self.memory.peak()
        one["private_after"] = self.memory.now()
        one["steps"] = {
            step: {"wall": ended - began, "cpu": after - before}
            for step, (began, ended, before, after) in self._steps.items()
        }
        self.found["iterations"].append(one)
        print(f"iteration {iteration}: {one['wall']:.1f} s, driver {one['cpu'].get(DRIVER, 0):.1f} CPU s", flush=True)
        self.save()
        self.begin(iteration + 1)

    def begin(self, iteration: int) -> None:
        """Measure another iteration from now on."""
        self._iteration = iteration
        self._steps.clear()
        self.memory.reset()
        self._last = self._measured.look()

    def _since(self, earlier: dict[str, Any]) -> dict[str, Any]:
        return difference(self._measured.look(), earlier)

    def save(self) -> None:
        self._results.write_text(json.dumps(self.found, indent=1) + "\n")


def generate_alone(options: dict[str, Any], watch: Watch) -> None:
    """Run the rollout steps of the first iteration alone, or an evaluation, and measure that as an iteration."""
    config = parse(options["config"])
    sources = Sources.open(config)
    ledger = Ledger.create(open_store(options["store"]), "scale", config, sources.digests, rules=rules(config))
    with ExitStack() as stack:
        stack.callback(ledger.acquire().release, Outcome.STOPPED)
        fleet = stack.enter_context(
            Fleet.start(config, name="scale", total_steps=1, model_digests=sources.digests, samples_only=True)
        )
        graders = open_graders(config, stack, None, lambda: fleet.scorer)
        run = sources.context(config, ledger, lambda: fleet, graders, watch)
        for engine in fleet.rollout:
            engine.health()  # once it has started
        watch.begin(0)
        if options["alone"] == "evaluation":
            for one in config.eval.benchmarks:
                evaluate(run, 0, one.name, None, name=one.name)
        else:
            shards = plan_round(run, 0, None, None, 0)
            with ThreadPoolExecutor(len(shards)) as pool:
                list(pool.map(lambda shard: rollout(run, 0, shard[0], None, [], [], **shard[1]), shards))
        watch.end(0)


def main() -> None:
    """Command line."""
    options = json.loads(sys.argv[1])
    synthetic_engines.install()
    if options["config"]["algorithm"].get("use_rollout_routing_replay"):
        import cairn.engines.models.routing

        cairn.engines.models.routing.replay_problems = lambda *_: iter(())
    watch = Watch(options)
    if options.get("alone"):
        generate_alone(options, watch)
        return
    from cairn.flows import train  # and with it Prefect, which generating alone does without

    waiting, serving = train.wait_for_engines, train.prefect_api

    def wait(*args: Any) -> None:
        began = time.perf_counter()
        waiting(*args)
        watch.waited(began)

    @contextmanager
    def serve(*args: Any) -> Iterator[None]:
        began = time.perf_counter()
        with serving(*args):
            watch.waited(began)
            yield

    train.wait_for_engines, train.prefect_api = wait, serve
    config = None if options.get("resume") else parse(options["config"])
    train.start(open_for_runs(options["store"]), "scale", config, takeover=True, on_event=watch)
    watch.save()


if __name__ == "__main__":
    main()
