"""Runs to be disturbed, their undisturbed twin, and one Prefect server for all of them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import pytest

from configs.schema.run import RunConfig
from flows.server import Server
from storage.commits import Commit, Step
from storage.ledger import Ledger
from storage.store import open_store
from tests.chaos.faults import Fault
from tests.tiny_run import tiny_config

DEADLINE = 240.0
"""Seconds that one driver may take to end."""

ITERATIONS = 4

OWNER = "CAIRN_TEST_RUN"
"""Environment variable by which the processes of a run are known."""


def chaos_config(assets: Path) -> RunConfig:
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
    """A run whose drivers are killed and started again."""

    store: Path
    config_file: Path
    api_url: str

    @property
    def witness(self) -> Path:
        return self.store / "witness.jsonl"

    @property
    def environment(self) -> dict[str, str]:
        """Of a driver's process."""
        own = {"PREFECT_API_URL": self.api_url, "PREFECT_LOGGING_LEVEL": "CRITICAL", OWNER: str(self.store)}
        return {**os.environ, **own}

    def drive(self, faults: Sequence[Fault] = ()) -> int:
        """Run one driver to its end, however that comes; returns its exit status."""
        command = [sys.executable, "-m", "tests.chaos.driver", str(self.store), "run", str(self.config_file)]
        command += [json.dumps([asdict(fault) for fault in faults]), str(self.witness)]
        with (self.store / "driver.log").open("ab") as log:
            driver = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
            try:
                return driver.wait(DEADLINE)
            finally:
                if driver.poll() is None:
                    os.killpg(driver.pid, signal.SIGKILL)

    def struck(self) -> list[dict[str, object]]:
        """The witnesses' accounts, in order."""
        return [json.loads(line) for line in self.witness.read_text().splitlines()]

    def log(self) -> str:
        return (self.store / "driver.log").read_text()[-4000:]

    def commits(self) -> list[Commit]:
        """Every commit of the run."""
        ledger = Ledger.open(open_store(str(self.store)), "run")
        return [commit for index in ledger.iterations() for commit in ledger.commits(index)]

    def state_digests(self) -> list[str | None]:
        """After each train step."""
        return [commit.state_digest for commit in self.commits() if commit.step is Step.TRAIN]


@pytest.fixture(scope="session")
def api_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = Server(tmp_path_factory.mktemp("prefect"))
    server.wait_ready()
    yield server.api_url
    server.stop()


@pytest.fixture(scope="session")
def config_file(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "config.json"
    file.write_text(chaos_config(tiny_assets).model_dump_json())
    return file


@pytest.fixture
def disturbed(tmp_path: Path, config_file: Path, api_url: str) -> Disturbed:
    return Disturbed(tmp_path, config_file, api_url)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, config_file: Path, api_url: str) -> Disturbed:
    run = Disturbed(tmp_path_factory.mktemp("undisturbed"), config_file, api_url)
    assert run.drive() == 0, run.log()
    return run


@pytest.fixture(autouse=True)
def nothing_is_left_behind(disturbed: Disturbed) -> Iterator[None]:
    segments = set(os.listdir("/dev/shm"))
    yield
    psutil.wait_procs(_processes_of(disturbed), timeout=15)
    left = [process.cmdline() for process in _processes_of(disturbed)]
    assert not left
    orphans = {name for name in set(os.listdir("/dev/shm")) - segments if not _is_mapped(f"/dev/shm/{name}")}
    assert not orphans


def _processes_of(disturbed: Disturbed) -> list[psutil.Process]:
    """Whatever a driver of the run started, directly or not: it has inherited the driver's environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(OWNER) == str(disturbed.store):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
    return found


def _is_mapped(path: str) -> bool:
    """Whether a living process, ours or another program's, uses a segment of shared memory."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if path in maps.read_text():
                return True
        except OSError:  # the process has ended meanwhile
            continue
    return False
