"""The tally of random kills: tests/chaos/tally.jsonl, one line a run, and what docs/recovery.md says of it.

Kept with the code: every `make chaos KILLS=…` adds to it. A line says which code was struck; those of one invocation
are of one seed. This module imports nothing of Cairn, since it makes a page of the documentation.
"""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = Path(__file__).with_name("tally.jsonl")

BEGIN, END = "<!-- Written by docs/generate.py from tests/chaos/tally.jsonl. -->", "<!-- End of the tally. -->"

COMMANDS = ("gc", "fork", "delete")
"""What is counted beside kills: commands that were given beside a driver."""


@dataclass
class Tallied:
    """One run."""

    at: str
    """Day, UTC."""
    code: str
    """Version of Cairn, as a commit says it."""
    family: str
    seed: int
    seconds: float
    drivers: int
    struck: dict[str, int]
    """Faults, by victim, each with a witness that was written before the blow."""
    recovery: dict[str, list[float]]
    """Seconds from each to the next commit, by victim, unless something else was struck before that."""
    samples: int
    samples_twice: int
    """Finished ones that were generated again."""
    digests: int
    """Train steps that were compared with the undisturbed run's."""
    differing_digests: int
    findings: list[str] = field(default_factory=list)
    """What else was not as it must be, a line each."""
    load: float = 0.0
    """Of the machine, averaged over the run's last five minutes; 0 where nobody looked."""


def add(run: Tallied, file: Path = FILE) -> None:
    """Append a run."""
    with file.open("a") as tally:
        tally.write(json.dumps(asdict(run)) + "\n")


def read(file: Path = FILE) -> list[Tallied]:
    """All runs so far."""
    return [Tallied(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def section(runs: Sequence[Tallied]) -> str:
    """What docs/recovery.md says of them."""
    struck: Counter[str] = Counter()
    recovery: dict[str, list[float]] = {}
    for run in runs:
        struck.update(run.struck)
        for victim, seconds in run.recovery.items():
            recovery.setdefault(victim, []).extend(seconds)
    kills = sum(count for victim, count in struck.items() if victim not in COMMANDS)
    commands = sum(struck.values()) - kills
    drivers = sum(run.drivers for run in runs)
    every = [seconds for victim, found in recovery.items() if victim not in COMMANDS for seconds in found]
    versions = Counter(run.code for run in runs)
    failed = [run for run in runs if run.findings]
    lines = [
        BEGIN,
        f"{kills} processes killed at random, and {commands} commands given beside a driver, "
        f"in {len(runs)} runs of {drivers} drivers, {drivers - len(runs)} of them restarts:",
        "",
        "| | |",
        "|---|---|",
        f"| finished samples generated twice | {sum(run.samples_twice for run in runs)} of "
        f"{sum(run.samples for run in runs)} |",
        f"| state digests that differ from the undisturbed run's | {sum(run.differing_digests for run in runs)} of "
        f"{sum(run.digests for run in runs)} |",
        f"| runs in which anything else was found | {len(failed)} |",
        "| seconds from a kill to the next commit, where nothing else was struck before it: median, worst | "
        f"{_seconds(every)} |",
        "",
        f"The machine's load was {_range([run.load for run in runs if run.load])}: on an idle one times are shorter.",
        "",
        "| victim | struck | seconds to the next commit: median, worst |",
        "|---|---|---|",
        *(f"| {victim} | {count} | {_seconds(recovery.get(victim, []))} |" for victim, count in struck.most_common()),
        "",
        "Versions struck, with their runs: "
        + (", ".join(f"`{code}` {count}" for code, count in versions.items()) or "none yet")
        + ".",
        *(["", *(f"Found in `{run.code}`: {run.findings[0]}" for run in failed)] if failed else []),
        END,
    ]
    return "\n".join(lines)


def _range(found: Sequence[float]) -> str:
    return f"{min(found):.0f} to {max(found):.0f}" if found else "not noted"


def _seconds(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.1f}, {max(found):.1f}" if found else "–"
