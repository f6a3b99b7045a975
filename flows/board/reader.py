"""The runs of a store, read a little at a time.

A look at a run lists the folder of its newest iteration, and reads its lease and its manifest. Only where something is
new, its status is read again: a few requests, whatever the length of the run.
"""

import itertools
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cairn.configs.errors import ConfigError
from cairn.configs.loader import from_manifest
from cairn.configs.schema.run import RunConfig
from cairn.flows.reading.costs import devices, priced
from cairn.flows.reading.failure import RunFailure
from cairn.flows.reading.samples import generated_reward
from cairn.flows.reading.views import RunState, RunStatus, run_status
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import LeaseState, all_leases, newest_lease
from cairn.storage.ledger.ledger import Ledger, newest_iteration_with_files
from cairn.storage.ledger.manifest import list_runs
from cairn.storage.store.errors import BeingDeleted, Damaged
from cairn.storage.store.store import REQUESTS, Store

INTERVAL = 0.3
"""Seconds between two looks at the store, at least."""
SHARE = 0.2
"""Share of the time that looks may take: a slow store is looked at less often."""
PATIENCE = 10.0
"""Seconds without a viewer after which the store is not looked at any more."""
POINTS = 60
"""Number of points of a run's curve in the table."""
_versions = itertools.count(1)
_AT_WORK = frozenset({RunState.RUNNING, RunState.WAITING, RunState.NEW})
_OF_SAMPLES = frozenset({Step.ROLLOUT, Step.REWARD, Step.FILTER, Step.ADVANTAGE})


class RunReader:
    """One run. Thread-safe."""

    def __init__(self, store: Store, run: str) -> None:
        self.store, self.run = store, run
        self.version = next(_versions)
        """Number that grows when something in the run is new; no other reader has it."""
        self.samples_version = self.version
        """Number that grows when a sample is new, or something about one."""
        self.ledger: Ledger | None = None
        """None where the run cannot be read."""
        self.status = RunStatus(run=run, state=RunState.NEW)
        self.curve: dict[int, float] = {}
        """Mean reward by iteration, or the loss of a run that samples nothing."""
        self.device_seconds: float | None = None
        self.is_read = False
        self._looking = threading.Lock()
        self._manifest = b""
        self._newest = 0
        self._seen: tuple[Any, ...] = ()
        self._ended: dict[int, float] = {}
        """Seconds of each driver that has ended, by epoch."""

    @property
    def config(self) -> RunConfig | None:
        """The run's configuration; None where the run cannot be read."""
        return None if self.ledger is None else self.ledger.config

    def look(self) -> bool:
        """Look at the run; return whether something is new. Raises FileNotFoundError if there is no such run."""
        with self._looking:
            manifest = self.store.read(layout.run_manifest(self.run))
            try:
                if manifest != self._manifest:
                    self._begin(manifest)
                return self._look()
            except (Damaged, ConfigError) as error:
                return self._is_unreadable(RunState.DAMAGED, error)
            except BeingDeleted as error:
                return self._is_unreadable(RunState.DELETED, error)
            finally:
                self.is_read = True

    def _begin(self, manifest: bytes) -> None:
        """Forget everything: the run is new, or another one of this name."""
        self.ledger = Ledger.open(self.store, self.run)
        self._manifest = manifest
        self._newest, self._seen, self._ended = self.ledger.first_iteration, (), {}
        self.curve = {}

    def _is_unreadable(self, state: RunState, error: Exception) -> bool:
        if self.status.state is state:
            return False
        self.ledger, self._seen, self._manifest = None, (), b""
        self.status = RunStatus(run=self.run, state=state, failure=RunFailure(what=str(error)))
        self.version = next(_versions)
        return True

    def _look(self) -> bool:
        ledger = self.ledger
        assert ledger is not None
        self._newest = max(self._newest, newest_iteration_with_files(self.store, self.run, self._newest))
        oldest = self._newest if self.status.iteration is None else min(self.status.iteration, self._newest)
        numbers = range(max(oldest, ledger.first_iteration), self._newest + 1)
        names = {
            f"{number}/{name}" for number in numbers for name in self.store.list(layout.iteration(self.run, number))
        }
        lease = newest_lease(self.store, self.run)
        driver = None if lease is None else (lease.epoch, lease.outcome, lease.looks_over())
        seen = (frozenset(names), driver, len(ledger.decisions.all()))
        if seen == self._seen:
            return False
        before = self._seen[0] if self._seen else frozenset()
        self.status = run_status(self.store, self.run)
        ledger.reread_terms()
        self._extend_curve(ledger)
        self.device_seconds = self._devices(ledger, lease)
        self._seen = seen
        self.version = next(_versions)
        if not before or any(map(_of_samples, names - before)):
            self.samples_version = self.version
        return True

    def _extend_curve(self, ledger: Ledger) -> None:
        """Add the iterations that are new to the curve; of those before the first look, `POINTS` at most."""
        last, first = ledger.last_iteration(), max(self.curve, default=-1) + 1
        if last is None:
            return
        stride = 1 if self.curve else -(-(last + 1) // POINTS)
        wanted = [*range(first, last, stride), last]
        samples = from_manifest(ledger.manifest.config).samples_responses
        for iteration in wanted:
            commit = ledger.find(iteration, Step.ADVANTAGE if samples else Step.TRAIN)
            if commit is not None:
                value = generated_reward(ledger, commit) if samples else commit.metrics.get("loss")
                if value is not None:
                    self.curve[iteration] = value

    def _devices(self, ledger: Ledger, lease: LeaseState | None) -> float:
        if lease is None:
            return 0.0
        if lease.epoch - 1 > len(self._ended):
            earlier = (one for one in all_leases(self.store, self.run) if one.epoch < lease.epoch)
            self._ended = {one.epoch: one.renewed_at - one.acquired_at for one in earlier}
        seconds = self._ended | {
            lease.epoch: max(lease.renewed_at, self.status.last_commit_at or 0.0) - lease.acquired_at
        }
        return sum(devices(ledger.config_under(epoch)).reserved * max(0.0, own) for epoch, own in seconds.items())

    def row(self, price: float | None) -> dict[str, Any]:
        """Return the run's row in the table of runs. `price`: of a device for an hour."""
        status, config = self.status, self.config
        curve = sorted((iteration, value) for iteration, value in self.curve.items() if math.isfinite(value))
        step = -(-len(curve) // POINTS) or 1
        spent = self.device_seconds
        return {
            "run": self.run,
            "version": self.version,
            "state": str(status.state) if self.is_read else "",
            **_reason(status),
            "parent": None if status.parent is None else f"{status.parent.run}@{status.parent.iteration}",
            "iterations": status.iterations,
            "num_rollout": status.num_rollout,
            "step": status.step,
            "curve": {
                "name": "reward" if config is None or config.samples_responses else "loss",
                "values": [round(value, 5) for _, value in curve[::-1][::step][::-1]],
            },
            "scores": {name: scores.last for name, scores in status.eval.items() if _is_known(scores.last)},
            "device": "CPU" if config is None else devices(config).kind,
            "device_hours": None if spent is None else spent / 3600,
            "price": priced(spent, price),
            "recipe": "" if config is None else f"{config.algorithm.advantage_estimator} of {config.model.path}",
            "last_commit_at": status.last_commit_at,
        }


def _reason(status: RunStatus) -> dict[str, str]:
    """Return why a run does not go on: a line, and the commonest error where it is known."""
    if (failure := status.failure) is not None:
        facts = dict(failure.facts())
        return {"reason": failure.what.partition("\n")[0], "error": facts.get("commonest error", "")}
    if status.gate is None or status.state not in (RunState.WAITING, RunState.REJECTED):
        return {"reason": "", "error": ""}
    decision = status.gate.verdict or status.gate.gate
    why = f": {decision.why}" if decision is not None and decision.why else ""
    return {"reason": f"before iteration {status.gate.iteration}{why}", "error": ""}


def _is_known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _of_samples(name: str) -> bool:
    entry = name.partition("/")[2]
    return entry.partition(".")[0] in _OF_SAMPLES or layout.parse_record(entry) is not None


class StoreReader:
    """All runs of a store, looked at by a thread of its own as long as somebody asks. Thread-safe."""

    def __init__(self, store: Store, price: float | None = None) -> None:
        self.store = store
        self._price = price
        self._runs: dict[str, RunReader] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._asked: dict[str, float] = {}
        """Time of the last question about a run, by its name; of one about all runs, by the empty name."""
        self._turn = 0
        self._version = 0
        self._trouble: Exception | None = None
        self._wanted, self._over, self._looked = threading.Event(), threading.Event(), threading.Event()
        self._changed = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="board", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._wanted.set()
        self._thread.join()

    def rows(self) -> tuple[int, Sequence[Mapping[str, Any]]]:
        """Return the rows of all runs that were read so far, and a number that differs when they do. Waits for the
        names of the runs at first. Raises StoreError while the store does not respond."""
        self._ask("")
        self._looked.wait(PATIENCE)
        if self._trouble is not None:
            raise self._trouble
        with self._changed:
            return self._version, list(self._rows.values())

    def run(self, name: str) -> RunReader:
        """Return a run, which is looked at each time from now on as long as it is asked for. Raises FileNotFoundError
        if there is no such run, StoreError."""
        self._ask(name)
        reader = self._reader(layout.check_name(name, "run"))
        if not reader.is_read and not self._look(reader):
            raise FileNotFoundError(f"there is no run {name!r} in {self.store.url}")
        if reader.ledger is None:
            raise Damaged(f"run {name!r} is {reader.status.state}; see `cairn verify {name}`")
        return reader

    def _ask(self, name: str) -> None:
        self._asked[name] = time.monotonic()
        self._wanted.set()

    def _is_wanted(self, name: str) -> bool:
        return time.monotonic() - self._asked.get(name, float("-inf")) < PATIENCE

    def _work(self) -> None:
        with ThreadPoolExecutor(REQUESTS) as pool:
            self._look_at_all(pool)  # once, for the first viewer
            while not self._over.is_set():
                if not any(map(self._is_wanted, list(self._asked))):
                    self._wanted.clear()
                    self._wanted.wait()
                began = time.monotonic()
                self._look_at_all(pool)
                self._over.wait(max(INTERVAL, (time.monotonic() - began) * (1 / SHARE - 1)))

    def _look_at_all(self, pool: ThreadPoolExecutor) -> None:
        try:
            names = list_runs(self.store)
            for name in set(self._runs) - set(names):
                self._forget(name)
            fresh = [name for name in names if name not in self._runs]
            for name in fresh:
                self._keep(self._reader(name))
            self._looked.set()
            busy = [name for name in names if name not in fresh and self._is_busy(self._runs[name])]
            idle = [name for name in names if name not in fresh and name not in busy]
            turn = [idle[(self._turn + at) % len(idle)] for at in range(min(REQUESTS, len(idle)))]
            self._turn += len(turn)
            list(pool.map(self._look, [self._runs[name] for name in (*busy, *fresh, *turn)]))
            self._trouble = None
        except Exception as error:  # the store may come back
            self._trouble = error
            self._looked.set()

    def _is_busy(self, reader: RunReader) -> bool:
        return reader.status.state in _AT_WORK or self._is_wanted(reader.run)

    def _look(self, reader: RunReader) -> bool:
        """Look at a run; return whether there is one."""
        try:
            if reader.look():
                self._keep(reader)
        except FileNotFoundError:
            self._forget(reader.run)
            return False
        return True

    def _reader(self, name: str) -> RunReader:
        with self._changed:
            return self._runs.setdefault(name, RunReader(self.store, name))

    def _keep(self, reader: RunReader) -> None:
        row = reader.row(self._price)
        with self._changed:
            self._rows[reader.run] = row
            self._version += 1

    def _forget(self, name: str) -> None:
        with self._changed:
            self._runs.pop(name, None)
            if self._rows.pop(name, None) is not None:
                self._version += 1
