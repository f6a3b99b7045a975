"""What `make chaos` found, as JSON for machines and Markdown for people, in build/chaos/; and how long recovery took in
tests of clusters, which note it:

    python -m tests.chaos.report        prints the table
"""

import json
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.matrix import cells
from tests.chaos.plans import CI_PLANS, whole

FOLDER = Path("build/chaos")

RECOVERIES = Path(__file__).parents[2] / FOLDER / "recoveries.jsonl"


@dataclass
class RunReport:
    """One run."""

    name: str
    configuration: str
    seconds: float
    exits: list[int]
    """How its drivers ended."""
    faults: list[dict[str, Any]]
    """The witnesses' accounts, each with `seconds_to_recover`."""
    findings: list[str]
    """What was not as it should be."""
    samples: int = 0
    samples_twice: int = 0
    """Finished ones that were generated again."""
    tokens: int = 0
    tokens_again: int = 0
    """At most: all tokens of the groups that were asked for again."""
    digests: int = 0
    """Train steps whose state was compared."""
    differing_digests: int = 0
    """Those that ended in another state than the undisturbed run's, or than done again."""


@dataclass
class Report:
    """Everything; written after each run."""

    seed: int
    kills: int
    """Random ones that were asked for."""
    cases: int
    """Of the matrix, those that were chosen."""
    machine: dict[str, Any] = field(default_factory=lambda: {"cores": os.cpu_count(), "load": os.getloadavg()[0]})
    runs: list[RunReport] = field(default_factory=list)

    def write(self) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "report.json").write_text(json.dumps(asdict(self), indent=1) + "\n")
        (FOLDER / "report.md").write_text(self.markdown())

    @property
    def failed(self) -> list[RunReport]:
        return [run for run in self.runs if run.findings]

    def markdown(self) -> str:
        faults = [fault for run in self.runs for fault in run.faults]
        random = sum("step" not in fault for fault in faults)
        equal = len(self.runs) - len(self.failed)
        tokens, again = sum(run.tokens for run in self.runs), sum(run.tokens_again for run in self.runs)
        samples, twice = sum(run.samples for run in self.runs), sum(run.samples_twice for run in self.runs)
        lines = [
            "# Chaos",
            "",
            f"{self.cases} cases of the matrix and {self.kills} random kills (seed {self.seed}) were asked for; "
            f"{len(faults) - random} and {random} faults happened, in {len(self.runs)} runs and "
            f"{sum(len(run.exits) for run in self.runs)} drivers. {equal} of {len(self.runs)} runs ended as they must "
            f"(tests/chaos/oracle.py). Finished samples generated twice: {twice} of {samples}; tokens generated twice: "
            f"at most {again} of {tokens} ({100 * again / max(1, tokens):.1f} %).",
            "",
            cells_struck_by_ci(),
            "",
            f"{self.machine['cores']} cores, load {self.machine['load']:.1f} at the start.",
            "",
            "| victim | faults | seconds to recover: median | most |",
            "|---|---|---|---|",
            *(_recovery(victim, faults) for victim in sorted(Counter(fault["victim"] for fault in faults))),
            "",
            "| run | configuration | drivers | faults | seconds | samples, tokens generated twice | found |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| {run.name} | {run.configuration} | {len(run.exits)} | {len(run.faults)} | {run.seconds:.0f} | "
                f"{run.samples_twice} of {run.samples}, {run.tokens_again} of {run.tokens} | "
                f"{_cell(run.findings[0]) if run.findings else 'nothing'} |"
                for run in self.runs
            ),
            "",
        ]
        return "\n".join(lines)


def cells_struck_by_ci() -> str:
    """How much of the matrix the tests strike, in a sentence."""
    matrix, struck = cells(whole()), cells(CI_PLANS)
    return (
        f"`make test-all` strikes {len(struck & matrix)} of the {len(matrix)} cells of the matrix (configuration, "
        "step, moment and victim)."
    )


def _recovery(victim: str, faults: Sequence[dict[str, Any]]) -> str:
    of_victim = [fault for fault in faults if fault["victim"] == victim]
    seconds = [found for fault in of_victim if (found := fault.get("seconds_to_recover")) is not None]
    figures = f"{statistics.median(seconds):.1f} | {max(seconds):.1f}" if seconds else "– | –"
    return f"| {victim} | {len(of_victim)} | {figures} |"


def _cell(text: str) -> str:
    return f"**{text.splitlines()[0].replace('|', '/')}**"


def recovered(what: str, seconds: float) -> None:
    """Note how long a recovery took."""
    RECOVERIES.parent.mkdir(parents=True, exist_ok=True)
    with RECOVERIES.open("a") as noted:
        noted.write(json.dumps({"what": what, "seconds": round(seconds, 1), "load": os.getloadavg()[0]}) + "\n")


def recoveries() -> str:
    """Return the table of all recoveries that were noted."""
    noted = [json.loads(line) for line in RECOVERIES.read_text().splitlines()]
    lines = ["| what | times | seconds: median | most | load of the machine, at most |", "|---|---|---|---|---|"]
    for what in dict.fromkeys(each["what"] for each in noted):
        seconds = [each["seconds"] for each in noted if each["what"] == what]
        load = max(each["load"] for each in noted if each["what"] == what)
        lines.append(
            f"| {what} | {len(seconds)} | {statistics.median(seconds):.1f} | {max(seconds):.1f} | {load:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(recoveries())
