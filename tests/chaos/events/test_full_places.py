"""A run on a machine whose shared memory, spill folder or staging folder is full waits or ends with a sentence that
names the place, and goes on when there is room, as if nothing had been."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.upkeep.verification import verify
from tests.chaos.events.crowded import OBJECT_STORE
from tests.chaos.oracle import strays_after_gc
from tests.chaos.runs import DEADLINE, Disturbed
from tests.small_disk import on_small_disks, why_not
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

ITERATIONS = 2
SHARED_MEMORY = OBJECT_STORE + 16 * 2**20
DISK = 128 * 2**20


class Machine:
    """A machine with little shared memory, a little disk for temporary files and one for weights on their way."""

    def __init__(self, folder: Path, temporary: Path, config: RunConfig, api_url: str) -> None:
        (folder / "config.json").write_text(config.model_dump_json())
        self.temporary, self.staging = temporary, folder / "staging"
        environment = {"PREFECT_API_URL": api_url, "TMPDIR": str(temporary)}
        self.run = Disturbed(folder, folder / "config.json", environment)

    def drive(self, place: str = "folder", iteration: int = 99, step: str = "eval", stays: bool = False) -> str:
        """Start a driver, fill a place when a step begins, and return what the driver says, its exit status last.

        What Ray's logger says of its own files, for which there is no room either, is left out.
        """
        disks = {Path("/dev/shm"): SHARED_MEMORY, self.temporary: DISK, self.staging: DISK}
        words = [self.run.store_url, self.run.name, self.run.config_file, place, self.staging, iteration, step]
        driver = subprocess.run(
            [
                *on_small_disks(disks),
                *(sys.executable, "-m", "tests.chaos.events.crowded"),
                *(*map(str, words), "stays" if stays else "goes"),
            ],
            env=self.run.whole_environment(),
            cwd=self.run.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE,
        )
        output = re.sub(r"^\[\*\*\* LOG ERROR .*\n", "", driver.stdout, flags=re.MULTILINE)
        return f"{output}exit {driver.returncode}"


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    return tiny_config(
        tiny_assets,
        rollout={"num_rollout": ITERATIONS},
        checkpoint={"save_interval": 1},
        retry={"rules": [{"errors": ["disk"], "retries": 2, "retry_delay_seconds": 1.0}]},
    )


@pytest.fixture(scope="module")
def expected(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> list[str | None]:
    with tiny_context(str(tmp_path_factory.mktemp("whole")), config) as (run, _):
        for index in range(ITERATIONS):
            iteration(run, DirectSteps(run), index)
        return train_digests(run, range(ITERATIONS))


@pytest.fixture
def machine(config: RunConfig, tmp_path: Path, api_url: str) -> Iterator[Machine]:
    (tmp_path / "staging").mkdir()
    by_disk = {"update_weight_transport": "disk", "update_weight_disk_dir": str(tmp_path / "staging")}
    config = config.model_copy(update={"fleet": config.fleet.model_copy(update=by_disk)})
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as temporary:  # Ray wants a short path
        machine = Machine(tmp_path, Path(temporary), config, api_url)
        yield machine
        machine.run.kill_what_is_left()


def require_whole(run: Disturbed, expected: list[str | None]) -> None:
    assert run.state_digests() == expected
    assert not [finding for checked in verify(run.ledger()) for finding in checked.findings]
    assert not strays_after_gc(run.ledger())
    assert not run.left_behind()


def test_shared_memory_that_others_fill_costs_nothing(machine: Machine, expected: list[str | None]) -> None:
    output = machine.drive("memory", 0, "rollout", stays=True)
    assert output == "full: memory\nexit 0"
    require_whole(machine.run, expected)


def test_without_room_for_rays_objects_or_weights_on_their_way_a_run_waits_or_ends_with_a_sentence(
    machine: Machine, expected: list[str | None]
) -> None:
    output = machine.drive("objects", 1, "train", stays=True)
    full = rf"the driver: no space is left for Ray's objects: .* disk of {machine.temporary}/cairn-\w+, to which .*"
    assert re.fullmatch(rf"full: objects\n{full}\nexit 1", output)
    assert machine.run.ledger().find(1, Step.TRAIN) is None
    output = machine.drive("folder", 1, "sync")
    full = rf"sync failed \(disk\): cannot write to {machine.staging}/\S+: no space is left there; free some"
    assert re.fullmatch(rf"full: folder\n{full}\nleft: folder\nexit 0", output)
    synced = machine.run.ledger().find(1, Step.SYNC)
    assert synced is not None
    assert synced.metrics["retries/disk"] == 1
    require_whole(machine.run, expected)
