"""A run whose drivers are struck and started again, and what must hold of it at its end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from configs.schema.run import RunConfig
from flows.train import PREFECT_HOME
from storage.commits import Commit, Step
from storage.ledger import Ledger
from storage.snapshots import read_table
from storage.store import open_store
from tests.chaos.faults import Fault
from tests.tiny_run import tiny_config

ROOT = Path(__file__).parents[2]

DEADLINE = 300.0
"""Seconds that one driver may take to end."""

ITERATIONS = 4

OWNER = "CAIRN_TEST_RUN"
"""Environment variable by which the processes of a run are known."""


def chaos_config(assets: Path, **sections: dict[str, Any]) -> RunConfig:
    """Every step of the DAG, two shards a round, two optimizer steps a rollout; checkpoints, evaluations at times."""
    return tiny_config(
        assets,
        rollout={
            "num_rollout": ITERATIONS,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 12,
            "num_engines": 2,
        },
        algorithm={"use_kl_loss": True, "kl_loss_coef": 0.01},
        training={"lr": 1e-3, "num_threads": 1, "num_steps_per_rollout": 2},
        eval={
            "eval_interval": 2,
            "benchmarks": [
                {"name": "h", "path": str(assets / "heldout.jsonl"), "rm_type": "random", "max_response_len": 6}
            ],
        },
        checkpoint={"save_interval": 2},
        retry={"retry_delay_seconds": 0.1},
        fleet={"call_timeout": 20},
    )


@dataclass
class Disturbed:
    """A run in a folder of its own: its drivers' working folder, logs and witnesses, and its ledger unless on S3."""

    folder: Path
    config_file: Path
    environment: Mapping[str, str]
    """Of its drivers, beside this process's own; PREFECT_API_URL must be in it unless they start a server each."""
    store_url: str = ""
    exits: list[int] = field(default_factory=list)
    """Of its drivers so far."""

    def __post_init__(self) -> None:
        self.store_url = self.store_url or str(self.folder)

    @property
    def witness(self) -> Path:
        return self.folder / "witness.jsonl"

    @property
    def prefect_home(self) -> Path:
        """Of the servers that its drivers start."""
        return self.folder / PREFECT_HOME

    def start(
        self, faults: Sequence[Fault] = (), *, own_prefect: bool = False, takeover: bool = False
    ) -> "subprocess.Popen[bytes]":
        """Start a driver, in a session of its own."""
        command = [sys.executable, "-m", "tests.chaos.driver", self.store_url, "run", str(self.config_file)]
        command += [str(self.folder), json.dumps([asdict(fault) for fault in faults]), *["takeover"] * takeover]
        with (self.folder / "driver.log").open("ab") as log:
            return subprocess.Popen(
                command,
                env=self.whole_environment(own_prefect),
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def whole_environment(self, own_prefect: bool = False) -> dict[str, str]:
        own = {"PREFECT_LOGGING_LEVEL": "CRITICAL", "PYTHONPATH": str(ROOT), OWNER: str(self.folder)}
        environment = {**os.environ, **self.environment, **own}
        if own_prefect:
            environment.pop("PREFECT_API_URL", None)
        return environment

    def drive(self, faults: Sequence[Fault] = (), *, own_prefect: bool = False) -> int:
        """Run one driver to its end, however that comes; returns its exit status."""
        driver = self.start(faults, own_prefect=own_prefect)
        try:
            self.exits.append(driver.wait(DEADLINE))
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
        return self.exits[-1]

    def struck(self) -> list[dict[str, Any]]:
        """The witnesses' accounts, in order."""
        return [json.loads(line) for line in self.witness.read_text().splitlines()] if self.witness.exists() else []

    def log(self) -> str:
        """The end of what its drivers had to say."""
        return self.whole_log()[-4000:]

    def whole_log(self) -> str:
        """All that its drivers had to say."""
        log = self.folder / "driver.log"
        return log.read_text() if log.exists() else ""

    def ledger(self) -> Ledger:
        return Ledger.open(open_store(self.store_url), "run")

    def commits(self) -> list[Commit]:
        """Every commit of the run."""
        ledger = self.ledger()
        return [commit for index in ledger.iterations() for commit in ledger.commits(index)]

    def state_digests(self) -> list[str | None]:
        """After each train step."""
        return [commit.state_digest for commit in self.commits() if commit.step is Step.TRAIN]

    def tokens_regenerated(self) -> tuple[int, int]:
        """Tokens of the groups that engines were asked for more than once, and of all: a killed engine had generated
        no more than the former in vain."""
        asked = Counter(id for line in (self.folder / "asked.jsonl").open() for id in json.loads(line))
        again = every = 0
        ledger = self.ledger()
        for commit in self.commits():
            if commit.step is Step.ROLLOUT:
                (output,) = commit.outputs
                for row in read_table(ledger.store, "run", output).select(["group_id", "response_ids"]).to_pylist():
                    every += len(row["response_ids"])
                    again += len(row["response_ids"]) * (asked[row["group_id"]] - 1)
        return again, every

    def left_behind(self, patience: float = 20.0) -> list[list[str]]:
        """Command lines of what its drivers started and what is still there after `patience` seconds."""
        end = time.monotonic() + patience
        while (found := self._processes()) and time.monotonic() < end:
            time.sleep(0.2)
        return list(found.values())

    def kill_what_is_left(self) -> None:
        """End all that its drivers started, and themselves."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _processes(self) -> dict[psutil.Process, list[str]]:
        """Whatever a driver of the run started, directly or not, with its command line: it has inherited the driver's
        environment."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(OWNER) == str(self.folder):
                    found[process] = process.cmdline()
        return found


def differences(run: Disturbed, undisturbed: Disturbed) -> list[str]:
    """What of a finished run is not as in its undisturbed twin: nothing, as it should be."""
    found = []
    if run.state_digests() != undisturbed.state_digests() or len(run.state_digests()) != ITERATIONS:
        found.append(f"state digests {run.state_digests()}, expected {undisturbed.state_digests()}")
    found += recommitted(run)
    other = {commit.name for commit in run.commits()} ^ {commit.name for commit in undisturbed.commits()}
    if other:
        found.append(f"committed in one of the two alone: {sorted(other)}")
    return found


def recommitted(run: Disturbed) -> list[str]:
    """What tells that a step was committed by more than one driver, or by one and changed since. A driver that is
    killed right after a commit may not have noted it."""
    file = run.folder / "committed.jsonl"
    noted = [tuple(json.loads(line)) for line in file.open()] if file.exists() else []
    if run.exits and not noted:
        return ["its drivers have noted no commits"]
    found = []
    if twice := [name for name, times in Counter(name for name, _ in noted).items() if times > 1]:
        found.append(f"committed more than once: {twice}")
    if other := set(noted) - {(commit.name, commit.digest) for commit in run.commits()}:
        found.append(f"committed, and not so in the ledger: {sorted(other)}")
    return found


def seconds_to_recover(run: Disturbed) -> list[float | None]:
    """From each fault to the next commit, of the next driver where this one ended; None where none came after it."""
    commits = sorted(run.commits(), key=lambda commit: commit.committed_at)

    def recovery(fault: dict[str, Any]) -> float | None:
        before = max((commit.epoch for commit in commits if commit.committed_at <= fault["at"]), default=0)
        least = before + 1 if fault["victim"] in ("ray", "database") else 0
        later = (c.committed_at - fault["at"] for c in commits if c.committed_at > fault["at"] and c.epoch >= least)
        return next(later, None)

    return [recovery(fault) for fault in run.struck()]
