"""The whole matrix, then random kills: `python -m tests.chaos`, which `make chaos` runs. Exits with 1 if a run fails.

build/chaos/report.md, report.json    what happened; written after each run
build/chaos/runs/NAME/                a run's ledger, log and witnesses; removed where nothing was found

With --resume the runs that are in report.json already are not done again. An hour or two on two cores.
"""

import argparse
import json
import os
import random
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flows.server import Server
from tests.chaos.matrix import CI_SET, Plan, execute, whole
from tests.chaos.random_kills import random_kills
from tests.chaos.report import FOLDER, Report, RunReport
from tests.chaos.runs import Disturbed, chaos_config
from tests.faulty_s3 import proxy_process
from tests.s3 import S3Server, moto_server
from tests.tiny_run import write_assets


class Chaos:
    """Executes runs and reports them."""

    def __init__(self, report: Report, console: Console, stack: ExitStack) -> None:
        self._report = report
        self._console = console
        shutil.rmtree(FOLDER / "runs", ignore_errors=True)
        assets = self._folder("assets")
        config = chaos_config(write_assets(assets)).model_dump_json()
        self._config_file = assets / "config.json"
        self._config_file.write_text(config)
        server = Server(self._folder("prefect"))
        stack.callback(server.stop)
        server.wait_ready()
        self._environment = {"PREFECT_API_URL": server.api_url}
        self._s3: S3Server = stack.enter_context(moto_server())
        os.environ.update(self._s3.env)
        self._undisturbed = self._run("undisturbed")
        began = time.monotonic()
        if self._undisturbed.drive() != 0:
            sys.exit(f"the undisturbed run failed:\n{self._undisturbed.log()}")
        self._seconds = time.monotonic() - began

    def execute(self, plan: Plan) -> int:
        """One run of the matrix; returns how many of its faults happened."""
        run = self._run(plan.name)
        if not plan.on_s3:
            return self._reported(plan.name, run, lambda: execute(plan, run))
        with proxy_process(self._s3.endpoint) as proxy:
            run.store_url = f"s3://{self._s3.new_bucket()}/chaos"
            run.environment = {**self._environment, **self._s3.env, "AWS_ENDPOINT_URL": proxy.endpoint}
            return self._reported(plan.name, run, lambda: execute(plan, run))

    def kill(self, name: str, dice: random.Random, most: int, tell: Callable[[str], None]) -> int:
        """One run of random kills; returns how many happened."""
        run = self._run(name)
        return self._reported(name, run, lambda: random_kills(run, dice, most, self._seconds, tell))

    def _reported(self, name: str, run: Disturbed, work: Callable[[], list[str]]) -> int:
        began = time.monotonic()
        findings = work()
        report = RunReport.of(name, run, self._undisturbed, time.monotonic() - began, findings)
        self._report.runs.append(report)
        self._report.write()
        verdict = "[red]" + report.findings[0] if report.findings else "equal"
        self._console.print(f"{name}: {len(report.faults)} faults, {report.seconds:.0f} s, {verdict}")
        if not report.findings:
            shutil.rmtree(run.folder)
        return len(report.faults)

    def _run(self, name: str) -> Disturbed:
        return Disturbed(self._folder(name), self._config_file, self._environment)

    def _folder(self, name: str) -> Path:
        folder = (FOLDER / "runs" / name).absolute()
        folder.mkdir(parents=True)
        return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="random kills after the matrix")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32), help="of the random kills")
    parser.add_argument("--plans", nargs="*", help="runs of the matrix, by name; all by default")
    parser.add_argument("--resume", action="store_true", help="go on with the last report")
    arguments = parser.parse_args()
    plans = [
        plan
        for plan in [CI_SET, *whole()]
        if (arguments.plans is None and plan is not CI_SET) or plan.name in (arguments.plans or [])
    ]
    report = Report(arguments.seed, arguments.kills, sum(len(plan.faults) for plan in plans))
    if arguments.resume and (FOLDER / "report.json").exists():
        report.runs = [RunReport(**run) for run in json.loads((FOLDER / "report.json").read_text())["runs"]]
    done = {run.name: len(run.faults) for run in report.runs if not run.findings}
    report.runs = [run for run in report.runs if run.name in done]
    console = Console()
    console.print(f"random kills with seed {report.seed}")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with ExitStack() as stack, Progress(*columns, console=console) as progress:
        chaos = Chaos(report, console, stack)
        bar = progress.add_task("matrix", total=report.cases)
        for plan in plans:
            if plan.name not in done:
                progress.update(bar, description=plan.name)
                chaos.execute(plan)
            progress.advance(bar, len(plan.faults))
        bar, dice, number, happened = (
            progress.add_task("random kills", total=report.kills),
            random.Random(report.seed),
            0,
            0,
        )
        while happened < report.kills and len(report.failed) < 5:
            name = f"random-{number:03d}"
            number += 1
            tell = lambda text: progress.update(bar, description=text)  # noqa: E731
            count = done[name] if name in done else chaos.kill(name, dice, report.kills - happened, tell)
            happened += count
            progress.update(bar, completed=happened)
    console.print(f"the report is {FOLDER / 'report.md'}")
    if report.failed:
        sys.exit(f"{len(report.failed)} runs are not as they should be; their folders are in {FOLDER / 'runs'}")


if __name__ == "__main__":
    main()
