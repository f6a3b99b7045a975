"""The contents of a run's page, kept up to date: what a report has, from commits that are read once.

Commits and metrics of complete iterations stay in memory. What is computed anew (the page; the samples; costs, balance
and the fates of all groups, which need the whole run) rests after that for twenty times the CPU time that it took, so
that each takes a twentieth of a core at most, however long the run is.
"""

import threading
import time
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.flows.board.reader import RunReader
from cairn.flows.reading.balance import measured
from cairn.flows.reading.costs import run_costs
from cairn.flows.reading.episodes import Texts
from cairn.flows.reading.metrics import read_iterations
from cairn.flows.reading.views import RunState, RunStatus
from cairn.flows.report.content import curves_block, detail_blocks, run_values, sample_blocks, token_texts
from cairn.flows.report.data import (
    Choice,
    History,
    Iteration,
    Samples,
    history_of,
    iteration_of,
    read_groups,
    read_samples,
    read_tokens,
)
from cairn.flows.report.facts import configuration_facts
from cairn.flows.report.page import render_content
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger

SAMPLES = 1000
"""Number of samples that a page shows at first: those of the newest iterations that have so many."""
MOST_SAMPLES = 20_000
"""Number of samples that a page shows at most."""
_LARGEST = 12_000_000
"""Size of the samples of one answer in bytes at most."""
_RANGES = 3
"""Number of ranges of iterations whose samples stay in memory."""

_REST = 19
"""How much longer than the CPU time of its computation a value rests."""

Value = TypeVar("Value")
Answer = tuple[str, dict[str, Any]]
"""Tag, and what is sent."""


def silent(what: str, done: int, of: int) -> None:
    """Report no progress."""


class Lately(Generic[Value]):
    """A value that is computed again where its subject is another, but not too often."""

    def __init__(self) -> None:
        self._of: object = None
        self._value: Value | None = None
        self._next = 0.0

    def is_due(self, of: object, changed: bool = False) -> bool:
        """Whether the value would be computed again."""
        return self._value is None or ((changed or of != self._of) and time.monotonic() >= self._next)

    def get(self, of: object, compute: Callable[[], Value], changed: bool = False) -> Value:
        """Return the value; it may be that of an earlier subject. `changed`: whether this subject has changed."""
        return self.set(of, compute) if self.is_due(of, changed) else self.latest()

    def latest(self) -> Value:
        """Return the value as it was last computed."""
        assert self._value is not None
        return self._value

    def set(self, of: object, compute: Callable[[], Value]) -> Value:
        """Compute the value and return it."""
        is_first, began = self._value is None, time.process_time()
        self._value, self._of = compute(), of
        if not is_first:  # the first one also loads modules
            self._next = time.monotonic() + _REST * (time.process_time() - began)
        return self._value


class RunContents:
    """What the page of one run shows. Thread-safe: one answer at a time is computed."""

    def __init__(self, reader: RunReader, price: float | None = None) -> None:
        if reader.ledger is None:
            raise LookupError(f"run {reader.run!r} cannot be read: it is {reader.status.state}")
        self.reader, self.ledger = reader, reader.ledger
        self._price = price
        self._lock, self._reading, self._opening = (threading.RLock() for _ in range(3))
        """Locks of the values, of the samples, and of the tokenizer, which takes seconds to load."""
        self._read: dict[int, list[Commit]] = {}
        """Commits of complete iterations."""
        self._known: dict[int, Iteration] = {}
        self._costs, self._balance, self._groups = Lately[Any](), Lately[Any](), Lately[pa.Table]()
        self._configuration = Lately[dict[str, Any]]()
        self._values = Lately[tuple[str, dict[str, Any], bytes]]()
        self._answers: OrderedDict[tuple[int | None, int | None], Lately[Answer]] = OrderedDict()
        self._samples: OrderedDict[tuple[int, int, int], Samples] = OrderedDict()
        self._texts: Texts | None = None

    def values(self) -> tuple[str, Mapping[str, Any], bytes]:
        """Return a tag that differs when what follows does, the values of the page's template, and the curves."""
        with self._lock:
            version = self.reader.version
            due = any(part.is_due(version) for part in (self._costs, self._balance, self._groups))
            if not self._values.is_due(version, due):
                return self._values.latest()
            parts = self._parts(version)  # they rest by themselves: the page does not wait for the slowest
            return self._values.set(version, lambda: self._compute(version, *parts))

    def facts(self) -> dict[str, Any]:
        """Return what a page that is open shows anew."""
        _, values, _ = self.values()
        return {
            "title": f"{values['name']} – Cairn board",
            "content": render_content(values),
            "actions": offered(self.reader.status),
            **self.curves(),
        }

    def curves(self) -> dict[str, Any]:
        """Return the curves alone."""
        _, _, curves = self.values()
        return {"blocks": _packed({"curves": curves})}

    def samples(self, first: int | None, last: int | None) -> Answer:
        """Return the samples of the iterations from `first` to `last`, by default of the newest, and their tag."""
        with self._reading:
            answer = self._answers.setdefault((first, last), Lately())
            self._answers.move_to_end((first, last))
            while len(self._answers) > _RANGES:
                self._answers.popitem(last=False)
            version = self.reader.samples_version
            return answer.get(version, lambda: (f"{version}-{first}-{last}", self._read_samples(first, last)))

    def _read_samples(self, first: int | None, last: int | None) -> dict[str, Any]:
        ledger = self.ledger
        is_newest = first is None or last is None
        low, high = self._newest(ledger, SAMPLES) if first is None or last is None else (first, last)
        samples = self._samples_of(ledger, low, high)
        own = samples.rows.column("iteration")
        rows = samples.rows.filter(pc.and_(pc.greater_equal(own, low), pc.less_equal(own, high)))
        notes = list(samples.notes)
        if rows.num_rows > MOST_SAMPLES:
            rows = rows.slice(rows.num_rows - MOST_SAMPLES)
            notes.append(f"Only the last {MOST_SAMPLES:,} samples are listed: name fewer iterations.")
        blocks, cut = sample_blocks(Samples(rows), np.full(rows.num_rows, Choice.ALL, np.uint8), _LARGEST)
        if cut is not None:
            notes.append(f"Responses in the table are cut at {cut:,} characters.")
        bounds = list(pc.min_max(rows.column("iteration")).as_py().values()) if rows.num_rows else [low, high]
        head = ""
        if rows.num_rows:
            head = "Iteration" if bounds[0] == bounds[1] else "Iterations"
            head += " " + " to ".join(map(str, sorted(set(bounds))))
            head += ", the newest; name others below. " if is_newest else ". "
        head += "Keys: / searches, j and k (or the arrows in the table) move between samples."
        return {"blocks": _packed(blocks), "bounds": bounds, "notes": [head, *notes]}

    def tokens(self, iteration: int, group: int, index: int) -> dict[str, Any]:
        """Return tokens and turns of one sample. Raises LookupError if there is no such sample."""
        ledger = self.ledger
        place = {"iteration": iteration, "group_id": group, "sample_index": index}
        with self._reading:
            known = [samples.rows for samples in self._samples.values()]
        found = next((one for rows in known if (one := _row(rows, place)).num_rows), None)
        if found is None:  # what tokens are found by does not change, so an older table would do
            found = _row(self._samples_of(ledger, iteration, iteration).rows, place)
        if not found.num_rows:
            raise LookupError(f"iteration {iteration} has no sample {index} of group {group}")
        one = Samples(found.slice(0, 1))
        tokens = read_tokens(ledger, one, [0], silent)
        with self._opening:
            self._texts = self._texts or token_texts(ledger, one, tokens)
        return {"blocks": _packed(detail_blocks(ledger, one, np.zeros(1, np.int64), tokens, self._texts))}

    def _parts(self, version: int) -> tuple[History, Any, pa.Table, int]:
        """Return history, balance, groups and number of samples."""
        ledger, status, config = self.ledger, self.reader.status, self.reader.config
        assert config is not None
        numbers = ledger.iterations()
        read = list(self._iterations(ledger, numbers))
        for commits in read:
            if commits and commits[0].iteration < status.iterations and commits[0].iteration not in self._read:
                self._read[commits[0].iteration] = commits
                own = ledger.config_of(*commits)
                if (one := iteration_of(commits, own, imported=status.imported is not None)) is not None:
                    self._known[one.number] = one
        costs = self._costs.get(version, lambda: run_costs(ledger, self._price, read))
        history = history_of(ledger, read, costs, self._known)
        balance = self._balance.get(version, lambda: (measured(ledger, config, status.iterations, self._iterations),))
        groups = self._groups.get(version, lambda: read_groups(ledger))
        samples = sum(
            int(commit.metrics.get("samples", 0)) for c in read for commit in c if commit.step is Step.ROLLOUT
        )
        return history, balance[0], groups, samples

    def _compute(
        self, version: int, history: History, balance: Any, groups: pa.Table, samples: int
    ) -> tuple[str, dict[str, Any], bytes]:
        ledger, status, config = self.ledger, self.reader.status, self.reader.config
        assert config is not None
        curves = curves_block(history, groups, config).to_bytes()
        configuration = self._configuration.get(len(ledger.upgrades), lambda: configuration_facts(ledger))
        values = run_values(ledger, status, history, groups, samples, balance, None, configuration)
        nothing = {"count": 0, "note": "", "first": "", "last": "", "all_shown": True, "notes": ()}
        live = {"source": f"/data/runs/{ledger.run}"}
        return f"{version}-{time.monotonic_ns()}", {**values, "live": live, "samples": nothing}, curves

    def _iterations(self, ledger: Ledger, numbers: Iterable[int]) -> Iterable[list[Commit]]:
        """Yield the commits of each iteration; reads those that are not in memory."""
        wanted = list(numbers)
        unread = [number for number in wanted if number not in self._read]
        fresh = dict(zip(unread, read_iterations(ledger, unread), strict=True))
        return [self._read.get(number) or fresh[number] for number in wanted]

    def _samples_of(self, ledger: Ledger, first: int, last: int) -> Samples:
        """Return the samples of these iterations, and maybe of others around them."""
        with self._reading:
            now = self.reader.samples_version
            for (version, low, high), samples in self._samples.items():
                if version == now and low <= first and last <= high:
                    return samples
            samples = self._samples[now, first, last] = read_samples(ledger, silent, first, last)
            while len(self._samples) > _RANGES:
                self._samples.popitem(last=False)
            return samples

    def _newest(self, ledger: Ledger, count: int) -> tuple[int, int]:
        """Return the newest iterations that have so many samples."""
        config = self.reader.config
        assert config is not None
        last = ledger.last_iteration() or 0
        each = self._known[last - 1].metrics.get("rollout/samples", 0) if last - 1 in self._known else 0
        each = each or config.samples_per_rollout
        return max(0, last + 1 - max(2, -(-count // max(1, int(each))))), last


def _row(rows: pa.Table, place: Mapping[str, int]) -> pa.Table:
    for name, value in place.items():
        rows = rows.filter(pc.equal(rows.column(name), value))
    return rows


def offered(status: RunStatus) -> dict[str, Any]:
    """Return what a person may decide about a run now."""
    allowed = []
    if status.state in (RunState.WAITING, RunState.REJECTED):
        allowed.append("approve")
    if status.state is RunState.WAITING:
        allowed.append("reject")
    if (
        status.driver is not None
        and status.driver.outcome is None
        and status.state in (RunState.RUNNING, RunState.WAITING)
    ):
        allowed.append("cancel")
    newest = status.iterations - 1
    if newest >= 0 and status.num_rollout > 1:
        allowed.append("fork")
    return {"run": status.run, "allowed": allowed, "iteration": max(newest, 0), "name": f"{status.run}-fork"}


def _packed(blocks: Mapping[str, bytes]) -> dict[str, str]:
    return {name: b64encode(data).decode() for name, data in blocks.items()}
