"""A run whose drivers are struck and started again, and what it leaves to be looked at (see tests/chaos/oracle.py)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from cairn.configs.schema.run import RunConfig
from cairn.flows.orchestration.server import PREFECT_HOME
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.opening import open_store
from cairn.storage.upkeep.retention import is_retired
from tests.chaos.faults import CLUSTER, Fault, engines_of, mark_of
from tests.chaos.forked import ForkedDriver
from tests.machines import Machine
from tests.tiny_run import tiny_config
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]

DEADLINE = 900.0
"""Seconds that one driver may take to end: on a busy machine its engines alone take minutes to start."""

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


STREAM = (-1, "stream")
"""Where the samples of a stream are noted, in place of an iteration and a shard."""

Driver = ForkedDriver | subprocess.Popen[bytes]


@dataclass
class Generated:
    """Samples of a run's committed rollouts, and what of them engines were asked for more than once."""

    samples: int = 0
    samples_twice: int = 0
    """Those that were asked for again although they were finished: durable."""
    tokens: int = 0
    tokens_again: int = 0
    """At most: those of all samples that were asked for again; a killed engine had generated no more in vain."""


@dataclass
class Disturbed:
    """A run in a folder of its own: its drivers' working folder, logs and witnesses, and its ledger unless on S3."""

    folder: Path
    config_file: Path
    environment: Mapping[str, str]
    """Of its drivers, beside this process's own; PREFECT_API_URL must be in it unless they start a server each."""
    store_url: str = ""
    name: str = "run"
    cluster: psutil.Process | None = None
    """The raylet of the cluster that its drivers join: it has their engines."""
    warm: bool = False
    """Whether drivers are forked from a process that has imported all they need."""
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

    @property
    def config(self) -> RunConfig:
        """What its drivers are configured with."""
        return RunConfig.model_validate_json(self.config_file.read_text())

    def join(self, address: str) -> None:
        """Make its drivers join a cluster."""
        config = json.loads(self.config_file.read_text())
        config["fleet"]["ray_address"] = address
        self.config_file = self.folder / "config.json"
        self.config_file.write_text(json.dumps(config))

    def start(
        self,
        faults: Sequence[Fault] = (),
        *,
        own_prefect: bool = False,
        takeover: bool = False,
        on: Machine | None = None,
    ) -> Driver:
        """Start a driver, in a session of its own; on another machine than this if one is given."""
        arguments = [self.store_url, self.name, str(self.config_file), str(self.folder)]
        arguments += [json.dumps([asdict(fault) for fault in faults]), *["takeover"] * takeover]
        log, environment = self.folder / "driver.log", self.whole_environment(own_prefect)
        if self.warm:
            return ForkedDriver(arguments, environment, self.folder, log)
        with log.open("ab") as output:
            command = [sys.executable, "-m", "tests.chaos.driver", *arguments]
            return subprocess.Popen(
                command if on is None else on.words(*command),
                env=environment,
                cwd=self.folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def whole_environment(self, own_prefect: bool = False) -> dict[str, str]:
        own = {"PREFECT_LOGGING_LEVEL": "CRITICAL", OWNER: str(self.folder)}
        if self.cluster is not None:
            own[CLUSTER] = str(self.cluster.pid)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **self.environment, **own}
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

    def at_event(self, fault: Fault, driver: Driver, do: Callable[[], None]) -> None:
        """Wait until the driver has come to a fault `event`, do what happens then, and let the driver resume."""
        account = asdict(fault).items()
        wait_for(
            lambda: driver.poll() is not None or any(account <= struck.items() for struck in self.struck()), DEADLINE
        )
        assert driver.poll() is None, self.log()
        do()
        mark_of(self.witness, fault).touch()

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

    def broke(self) -> bool:
        """Whether a driver ended with a trace of its own; one that a sentence quotes is of SGLang's environment."""
        first_frames = re.findall(
            r"^Traceback \(most recent call last\):\n  File \"(.*?)\"", self.whole_log(), re.MULTILINE
        )
        return any(".venv-sglang" not in frame for frame in first_frames)

    def ledger(self, store_url: str | None = None) -> Ledger:
        """Of the run, or of a copy of it in another store."""
        return Ledger.open(open_store(store_url or self.store_url), self.name)

    def commits(self) -> list[Commit]:
        """Every commit of the run."""
        ledger = self.ledger()
        return [commit for index in ledger.iterations() for commit in ledger.commits(index)]

    def state_digests(self) -> list[str | None]:
        """After each train step."""
        return [commit.state_digest for commit in self.commits() if commit.step is Step.TRAIN]

    def generated(self) -> "Generated":
        """Return the number of its samples and tokens, and of those that were generated more than once."""
        noted = [json.loads(line) for line in (self.folder / "generated.jsonl").open()]
        requested: Counter[tuple[int, str, int, int]] = Counter()
        finished: set[tuple[int, str, int, int]] = set()
        repeated: Counter[tuple[int, str, int, int]] = Counter()
        for note in noted:
            for sample in note.get("finished", ()):
                finished.add((note["iteration"], note["shard"], *sample))
            for sample in note.get("asked", ()):
                key = (note["iteration"], note["shard"], *sample)
                requested[key] += 1
                repeated[key] += key in finished
        found = Generated()
        ledger = self.ledger()
        for commit in self.commits():
            if commit.step is Step.ROLLOUT and not is_retired(ledger, commit):
                (output,) = commit.outputs
                columns = ["group_id", "sample_index", "response_ids"]
                for row in read_table(ledger.store, commit.run, output).select(columns).to_pylist():
                    key = (commit.iteration, commit.shard or "", row["group_id"], row["sample_index"])
                    tokens = len(row["response_ids"])
                    found.samples += 1
                    found.tokens += tokens
                    streamed = (*STREAM, row["group_id"], row["sample_index"])
                    found.samples_twice += repeated[key] + repeated[streamed]
                    found.tokens_again += tokens * max(0, requested[key] - 1)
        return found

    def left_behind(self, patience: float = 20.0, *, engines: bool = True) -> list[list[str]]:
        """Command lines of what its drivers started and what is still there after `patience` seconds; without
        `engines`, those on a cluster that the drivers had joined may stay for the next one."""
        end = time.monotonic() + patience
        while (found := self._processes(engines)) and time.monotonic() < end:
            time.sleep(0.2)
        return [[Path(command[0]).name, *command[1:]] for command in found.values() if command]

    def kill_what_is_left(self) -> None:
        """End all that its drivers started, and themselves."""
        for process in self._processes(engines=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _processes(self, engines: bool) -> dict[psutil.Process, list[str]]:
        """Whatever a driver of the run started, directly or not, with its command line: it has inherited the driver's
        environment, or is an engine on the cluster that the driver had joined."""
        found = engines_of(self.cluster) if engines and self.cluster is not None else {}
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(OWNER) == str(self.folder):
                    found[process] = process.cmdline()
        return found
