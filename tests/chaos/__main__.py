"""The whole matrix, then random kills: `python -m tests.chaos`, which `make chaos` runs. Exits with 1 if a run fails.

build/chaos/report.md, report.json    what happened; written after each run
build/chaos/runs/NAME/                a run's ledger, log and witnesses; removed where nothing was found
tests/chaos/tally.jsonl               the random kills, added to those of earlier invocations

With --resume the runs that are in report.json already are not done again.
"""

import argparse
import json
import math
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.chaos import tally
from tests.chaos.configurations import CONFIGURATIONS
from tests.chaos.matrix import Plan, execute
from tests.chaos.oracle import differences, differing_digests, seconds_to_recover
from tests.chaos.plans import CI_PLANS, whole
from tests.chaos.random_kills import FAMILIES, random_kills
from tests.chaos.report import FOLDER, Report, RunReport
from tests.chaos.runs import ROOT, Disturbed
from tests.chaos.services import Services
from tests.shared_memory import watched_segments

os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")


class Chaos:
    """Executes runs and reports them."""

    def __init__(self, report: Report, console: Console, folder: Path) -> None:
        self._report = report
        self._console = console
        self.services = Services(folder)
        self._stack = ExitStack()
        self._stack.callback(self.services.close)

    def close(self) -> None:
        """End what is shared by runs."""
        self._stack.close()

    def execute(self, plan: Plan) -> None:
        """One run of the matrix."""
        self.services.warm = False
        self._reported(plan.name, plan.configuration, plan.on_s3, lambda run: execute(plan, run))

    def kill(self, name: str, family_name: str, seed: int, most: int, tell: Callable[[str], None]) -> int:
        """One run of random kills; returns how many faults happened."""
        self.services.warm = True
        family = FAMILIES[family_name]
        repeatable = CONFIGURATIONS[family.configuration].repeatable
        whole = self.services.undisturbed(family.configuration).seconds if repeatable else family.seconds
        within = whole / family.pace
        dice = random.Random(seed)
        report = self._reported(
            name, family.configuration, family.on_s3, lambda run: random_kills(run, family, dice, most, within, tell)
        )
        if report.faults:
            tally.add(tallied(family_name, seed, report))
        return len(report.faults)

    def _reported(
        self, name: str, configuration: str, on_s3: bool, work: Callable[[Disturbed], list[str]]
    ) -> RunReport:
        repeatable = CONFIGURATIONS[configuration].repeatable
        undisturbed = self.services.undisturbed(configuration).run if repeatable else None
        with ExitStack() as stack:
            left_segments = stack.enter_context(watched_segments())
            run = self.services.run(name, configuration)
            stack.callback(run.kill_what_is_left)
            if on_s3:
                stack.enter_context(self.services.on_s3(run))
            began = time.monotonic()
            report = RunReport(name, configuration, 0.0, run.exits, run.struck(), work(run))
            report.seconds = time.monotonic() - began
            report.faults = run.struck()
            if not report.findings:
                for fault, recovery in zip(report.faults, seconds_to_recover(run), strict=True):
                    fault["seconds_to_recover"] = recovery
                generated = run.generated()
                report.samples, report.samples_twice = generated.samples, generated.samples_twice
                report.tokens, report.tokens_again = generated.tokens, generated.tokens_again
                report.digests = len(run.state_digests())
                report.findings = differences(run, undisturbed, left_segments)
                report.differing_digests = (
                    differing_digests(run, undisturbed)
                    if undisturbed is not None
                    else sum("/train recomputed: " in finding for finding in report.findings)
                )
        self._report.runs.append(report)
        self._report.write()
        verdict = "[red]" + report.findings[0] if report.findings else "as it must be"
        self._console.print(f"{name}: {len(report.faults)} faults, {report.seconds:.0f} s, {verdict}", markup=False)
        if not report.findings:
            shutil.rmtree(run.folder)
        return report


def tallied(family: str, seed: int, report: RunReport) -> tally.Tallied:
    """A run of random kills as the tally has it."""
    recovery: dict[str, list[float]] = {}
    following = [*(fault["at"] for fault in report.faults[1:]), math.inf]
    for fault, next_at in zip(report.faults, following, strict=True):
        seconds = fault.get("seconds_to_recover")
        if seconds is not None and fault["at"] + seconds < next_at:
            recovery.setdefault(fault["victim"], []).append(round(seconds, 2))
    return tally.Tallied(
        at=time.strftime("%Y-%m-%d", time.gmtime()),
        code=code_under_test(),
        family=family,
        seed=seed,
        seconds=round(report.seconds, 1),
        drivers=len(report.exits),
        struck=dict(Counter(fault["victim"] for fault in report.faults)),
        recovery=recovery,
        samples=report.samples,
        samples_twice=report.samples_twice,
        digests=report.digests,
        differing_digests=report.differing_digests,
        findings=[finding.splitlines()[0] for finding in report.findings],  # what else they quote is of this machine
        load=round(os.getloadavg()[1], 1),
    )


def code_under_test() -> str:
    """The last commit that changed what is struck, `-dirty` where files of it differ from that."""
    folders = ["flows", "tasks", "engines", "storage", "configs"]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words, "--", *folders], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return git("log", "-1", "--format=%h", "--abbrev=10") + ("-dirty" if git("status", "--short") else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="random kills after the matrix")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32), help="of the random kills")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), help="of runs that are killed at random")
    parser.add_argument("--plans", nargs="*", help="runs of the matrix, by name; all by default")
    parser.add_argument("--resume", action="store_true", help="continue the last report")
    arguments = parser.parse_args()
    plans = [
        plan
        for plan in [*CI_PLANS, *whole()]
        if (arguments.plans is None and plan not in CI_PLANS) or plan.name in (arguments.plans or [])
    ]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background has it ignored
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = Report(arguments.seed, arguments.kills, sum(len(plan.faults) for plan in plans))
    if arguments.resume and (FOLDER / "report.json").exists():
        report.runs = [RunReport(**run) for run in json.loads((FOLDER / "report.json").read_text())["runs"]]
    done = {run.name: len(run.faults) for run in report.runs if not run.findings}
    report.runs = [run for run in report.runs if run.name in done]
    console = Console()
    console.print(f"random kills with seed {report.seed}")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    folder = (FOLDER / "runs").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    with ExitStack() as stack, Progress(*columns, console=console) as progress:
        chaos = Chaos(report, console, folder)
        stack.callback(chaos.close)
        bar = progress.add_task("matrix", total=report.cases)
        for plan in plans:
            if plan.name not in done:
                progress.update(bar, description=plan.name)
                chaos.execute(plan)
            progress.advance(bar, len(plan.faults))
        bar, dice, happened = progress.add_task("random kills", total=report.kills), random.Random(report.seed), 0
        while happened < report.kills and len(report.failed) < 5:
            weights = [FAMILIES[name].weight for name in arguments.families]
            (family,) = dice.choices(arguments.families, weights)
            seed = dice.randrange(2**32)
            name = f"random-{family}-{seed:08x}"
            tell = lambda text: progress.update(bar, description=text)  # noqa: E731
            count = done[name] if name in done else chaos.kill(name, family, seed, report.kills - happened, tell)
            happened += count
            progress.update(bar, completed=happened)
    console.print(f"the report is {FOLDER / 'report.md'}")
    if report.failed:
        sys.exit(f"{len(report.failed)} runs are not as they should be; their folders are in {FOLDER / 'runs'}")


if __name__ == "__main__":
    main()
