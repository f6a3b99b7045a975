"""Where a session's seconds are: a report by file and by cause, enforced shares, and a record of the long tiers.

Each test's time is split by cause: `import` (of modules), `compute` (this process's other CPU time), `children` (CPU
time of processes that the test started and that have ended) and `wait` (the rest: servers, actors, ranks, sleeps). The
report names the ten largest files, and the tests whose deadline is less than ten times what they took.

`--shares` fails a session in which a file takes more than `SHARE` of all tests' time and more than the share at which
`tests/README.md` names it. Shares are of the session's own total, so they do not depend on how fast the machine is.
Where other processes had nearly all of it, shares are not enforced: the file that ran meanwhile would be the largest.

`--record NAME` appends what ran to `tests/record.jsonl`: the tier, code version, time, cases, failures and seconds. A
session that runs all of the quick tests reports which recorded tier is older than its budget of changes.
"""

import builtins
import json
import os
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

SHARE = 0.05
"""Largest share of a session's time that a file may take without being named in `tests/README.md`."""

MARGIN = 1.5
"""How many times its named share a file may take: shares of what waits and what computes differ between machines."""

OWN = 0.25
"""Least part of a session's time that is not waiting, for its shares to say something: 0.77 on an idle machine with two
cores, 0.43 on one core, 0.34 under a load of 8."""

BUDGETS = {"all": 60, "ceph": 60}
"""Commits after which a tier's record is old."""

DEADLINE = 10
"""How many times its own seconds a test's deadline must be, at least."""

_README = Path(__file__).parent / "README.md"
_RECORD = Path(__file__).parent / "record.jsonl"
_CAUSES = ("import", "compute", "children", "wait")


@dataclass
class Seconds:
    """What tests took, in seconds."""

    cases: int = 0
    failed: int = 0
    wall: float = 0.0
    imports: float = 0.0
    own: float = 0.0
    children: float = 0.0

    def add(self, other: "Seconds") -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def by_cause(self) -> tuple[float, ...]:
        """Seconds of each of `_CAUSES`. Children of a waiting test count for no more than its wait."""
        compute = max(0.0, self.own - self.imports)
        children = min(self.children, max(0.0, self.wall - self.imports - compute))
        return self.imports, compute, children, max(0.0, self.wall - self.imports - compute - children)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("seconds", "where the seconds are (tests/seconds.py)")
    group.addoption("--shares", action="store_true", help="fail if a file takes more than its share")
    group.addoption("--record", metavar="NAME", help="append this session to tests/record.jsonl")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Measured(config), "cairn-seconds")


class Measured:
    """One process's tests, and in the process that reports, those of all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._begun = time.monotonic()
        self._files: dict[str, Seconds] = defaultdict(Seconds)
        self._short: list[str] = []
        self._failed = 0
        self._imports = _Imports()

    def pytest_unconfigure(self) -> None:
        self._imports.stop()

    @property
    def _controls_workers(self) -> bool:
        return not hasattr(self._config, "workerinput") and self._config.getoption("dist", "no") != "no"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self._controls_workers:
            return (yield)
        begun, before, imports = time.monotonic(), os.times(), self._imports.seconds
        self._failed = 0
        answer = yield
        after, wall = os.times(), time.monotonic() - begun
        took = Seconds(
            cases=1,
            failed=self._failed,
            wall=wall,
            imports=self._imports.seconds - imports,
            own=after.user + after.system - before.user - before.system,
            children=(after.children_user + after.children_system - before.children_user - before.children_system),
        )
        self._files[item.nodeid.partition("::")[0]].add(took)
        deadline = _deadline(item)
        if deadline and wall * DEADLINE > deadline:
            self._short.append(f"{item.nodeid} took {wall:.0f} s of {deadline:.0f} s")
        return answer

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: Any = yield
        self._failed = max(self._failed, int(report.failed))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workeroutput"):
            files = {file: asdict(seconds) for file, seconds in self._files.items()}
            self._config.workeroutput["seconds"] = {"files": files, "short": self._short}
            return
        if self._config.getoption("--shares") and self._over_their_share() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if name := self._config.getoption("--record"):
            self._write_record(name)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        found = getattr(node, "workeroutput", {}).get("seconds", {"files": {}, "short": []})
        for file, seconds in found["files"].items():
            self._files[file].add(Seconds(**seconds))
        self._short += found["short"]

    @property
    def _total(self) -> float:
        return sum(seconds.wall for seconds in self._files.values())

    @property
    def _every(self) -> Seconds:
        every = Seconds()
        for seconds in self._files.values():
            every.add(seconds)
        return every

    def _over_their_share(self) -> list[str]:
        *own, waiting = self._every.by_cause()
        if sum(own) < OWN * (sum(own) + waiting):
            return []
        named = named_shares(_README.read_text())
        return [
            f"{file} takes {seconds.wall / self._total:.1%} of all tests' time, more than "
            + (f"the {named[file]:.1%} at which tests/README.md names it" if file in named else f"{SHARE:.0%}")
            + ": make it shorter, move tests to a later tier (tests/tiers.py), or name it there with its reason"
            for file, seconds in self._files.items()
            if seconds.wall / self._total > max(SHARE, MARGIN * named.get(file, 0.0))
        ]

    def _write_record(self, name: str) -> None:
        line = {
            "tier": name,
            "commit": _git("rev-parse", "HEAD"),
            "changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "cases": sum(seconds.cases for seconds in self._files.values()),
            "failed": sum(seconds.failed for seconds in self._files.values()),
            "seconds": round(time.monotonic() - self._begun),
        }
        with _RECORD.open("a") as record:
            record.write(json.dumps(line) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        if len(self._files) > 1:
            terminalreporter.section("seconds by file and cause")
            write(f"{'share':>6} {'cases':>6} {'seconds':>8} " + " ".join(f"{cause:>8}" for cause in _CAUSES))
            largest = sorted(self._files.items(), key=lambda each: -each[1].wall)[:10]
            for file, seconds in [*largest, (f"all {len(self._files)} files", self._every)]:
                causes = " ".join(f"{value:8.1f}" for value in seconds.by_cause())
                share = seconds.wall / self._total
                write(f"{share:>6.1%} {seconds.cases:>6} {seconds.wall:8.1f} {causes}  {file}")
        if self._short:
            write(f"deadlines of less than {DEADLINE} times what a test took:")
            for line in self._short:
                write(f"  {line}")
        if self._config.getoption("--shares"):
            for line in [*self._over_their_share(), *old_records()]:
                write(line, yellow=True)


class _Imports:
    """Seconds that import statements of this process took. Those inside others count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._original = original = builtins.__import__

        def timed(*args: Any, **options: Any) -> Any:
            if self._depth:
                return original(*args, **options)
            self._depth += 1
            begun = time.monotonic()
            try:
                return original(*args, **options)
            finally:
                self._depth -= 1
                self.seconds += time.monotonic() - begun

        builtins.__import__ = timed

    def stop(self) -> None:
        builtins.__import__ = self._original


def named_shares(readme: str) -> dict[str, float]:
    """Shares by file, of the rows `| path | share % | …` of a page."""
    rows = re.findall(r"^\| `(tests/\S+\.py)` \| ([\d.]+) %", readme, re.MULTILINE)
    return {file: float(share) / 100 for file, share in rows}


def old_records() -> list[str]:
    """A sentence for each tier that did not pass within its budget of commits."""
    lines = [json.loads(line) for line in _RECORD.read_text().splitlines()] if _RECORD.exists() else []
    sentences = []
    for tier, budget in BUDGETS.items():
        last = next((line for line in reversed(lines) if line["tier"] == tier and not line["failed"]), None)
        since = _git("rev-list", "--count", f"{last['commit']}..HEAD") if last else ""
        if not since:
            sentences.append(f"no record of the tier '{tier}' for this history: run make test-all")
        elif int(since) > budget:
            sentences.append(
                f"the tier '{tier}' last passed {since} commits ago, more than {budget}: run make test-all"
            )
    return sentences


def _deadline(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0] if mark and mark.args else item.config.getini("timeout") or 0)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() if done.returncode == 0 else ""
