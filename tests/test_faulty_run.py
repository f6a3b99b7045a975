"""A whole run on an object store that misbehaves all the time and is away for a while, watched by a reader."""

import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from cairn.configs.schema.run import RunConfig
from cairn.flows.iteration import iteration
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.snapshots import read_bytes
from cairn.storage.store.s3 import S3Store
from cairn.storage.upkeep.verification import verify
from tests.faulty_s3 import Fault, FaultyProxy, Plan, faulty_proxy
from tests.s3 import S3Server
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

DEADLINE = 400
OUTAGE = 15.0
ITERATIONS = 3
ACCESS_KEY, SECRET_KEY = "AKIACAIRNSAFETYTEST", "cairn/Unmistakable+Secret/K7MDENG"


def mixed_faults() -> Plan:
    """Every twentieth request is refused for the moment, and of the reply to every twentieth GET half is lost."""
    seen = {"all": 0, "GET": 0}

    def plan(method: str, path: str) -> Fault | None:
        seen["all"] += 1
        seen["GET"] += method == "GET"
        if seen["all"] % 20 == 0:
            return Fault.UNAVAILABLE
        return Fault.TRUNCATE if method == "GET" and seen["GET"] % 20 == 10 else None

    return plan


class Reader(threading.Thread):
    """Reads the whole run again and again, past the proxy, as an onlooker who trusts every commit that is there."""

    def __init__(self, store: S3Store) -> None:
        super().__init__(name="reader", daemon=True)
        self._store = store
        self._stopped = threading.Event()
        self.rounds = 0
        self.seen: set[str] = set()
        self.faults: list[str] = []

    def run(self) -> None:
        while not self._stopped.wait(0.05):
            try:
                self._read(Ledger.open(self._store, "run"))
                self.rounds += 1
            except FileNotFoundError as error:
                if self.rounds:  # else it has not begun
                    self.faults.append(str(error))
            except Exception as error:  # a thread that ends sees nothing of what it is to see
                self.faults.append(repr(error))

    def stop(self) -> None:
        self._stopped.set()
        self.join(60)

    def _read(self, ledger: Ledger) -> None:
        """Newest first: what a commit was made from is looked for after the commit was found."""
        digests: dict[str, str] = {}
        found: list[Commit] = []
        for index in reversed(ledger.iterations()):
            for commit in ledger.commits(index):
                found.append(commit)
                digests[commit.name] = commit.digest
                for output in commit.outputs:
                    read_bytes(ledger.store, commit.run, output)
        for commit in found:
            for name, digest in commit.inputs.items():
                if "/" in name and digests.get(name) != digest:
                    self.faults.append(f"{commit.name} was made from {name}, which is not there")
        self.seen.update(digests)


@dataclass
class FaultyRun:
    """What was left of it."""

    store: S3Store
    folder: Path
    """Where the command was given, with Ray's logs."""
    output: str
    status: int
    happened: dict[Fault, int]
    requests: int
    reader: Reader


def faulty_config(assets: Path) -> RunConfig:
    return tiny_config(assets, checkpoint={"save_interval": 1}, tracking={"tensorboard_dir": "board"})


@pytest.fixture(scope="module")
def run(tiny_assets: Path, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyRun]:
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "run.yaml").write_text(yaml.safe_dump(faulty_config(tiny_assets).model_dump(mode="json")))
    server = replace(s3_server, access_key=ACCESS_KEY, secret_key=SECRET_KEY)
    url = f"s3://{s3_server.new_bucket()}/runs-of-{uuid.uuid4().hex[:8]}"
    with faulty_proxy(server.endpoint) as proxy, pytest.MonkeyPatch.context() as environment:
        proxy.plan, proxy.latency = mixed_faults(), 0.005
        for name, value in server.env.items():
            environment.setenv(name, value)
        store = S3Store(url)
        reader = Reader(store)
        reader.start()
        with (
            (folder / "output").open("wb") as output,
            tempfile.TemporaryDirectory(prefix="c-", ignore_cleanup_errors=True) as temporary,
        ):
            own = replace(server, endpoint=proxy.endpoint).env | {"TMPDIR": temporary}
            cairn = Path(sys.executable).with_name("cairn")
            driver = subprocess.Popen(
                [cairn, "train", "run.yaml", "--store", url], cwd=folder, stdout=output, stderr=output,
                env={**os.environ, **own},
            )  # fmt: skip
            try:
                begin_outage(driver, proxy, store)
                await_end(driver, Path(temporary), folder / "temporary")
            finally:
                driver.kill()
                driver.wait()
        reader.stop()
        text = (folder / "output").read_text()
        happened, requests = dict(proxy.happened), proxy.requests.total()
        yield FaultyRun(store, folder, text, driver.returncode, happened, requests, reader)


def begin_outage(driver: "subprocess.Popen[bytes]", proxy: FaultyProxy, store: S3Store) -> None:
    """In the middle of the run: when the second iteration has its first commit."""
    deadline = time.monotonic() + DEADLINE
    while not store.exists(layout.record("run", 1, 0)):
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    proxy.outage(OUTAGE)


def await_end(driver: "subprocess.Popen[bytes]", temporary: Path, copy: Path) -> None:
    """Wait for the driver, and keep what Ray writes, which goes away with it; but for files of the last second."""
    deadline = time.monotonic() + DEADLINE
    while driver.poll() is None:
        assert time.monotonic() < deadline
        for folder, _, names in os.walk(temporary):  # unlike glob, it minds no folder that goes away meanwhile
            if "logs" in Path(folder).parts:
                target = copy / Path(folder).relative_to(temporary)
                target.mkdir(parents=True, exist_ok=True)
                for name in names:
                    with suppress(FileNotFoundError, FileExistsError):
                        os.link(Path(folder, name), target / name)  # which holds what is written later too
        time.sleep(1)


pytestmark = [pytest.mark.proof, pytest.mark.timeout(2 * DEADLINE)]


def test_the_run_completes_with_the_weights_of_a_run_on_local_files(
    run: FaultyRun, tiny_assets: Path, tmp_path: Path
) -> None:
    assert run.status == 0, run.output
    assert set(run.happened) == {Fault.UNAVAILABLE, Fault.TRUNCATE, Fault.OUTAGE}
    with tiny_context(str(tmp_path), faulty_config(tiny_assets)) as (local, _):
        for index in range(ITERATIONS):
            iteration(local, DirectSteps(local), index)
        undisturbed = train_digests(local, range(ITERATIONS))
    ledger = Ledger.open(run.store, "run")
    trained = [ledger.find(index, Step.TRAIN) for index in range(ITERATIONS)]
    assert [commit.state_digest for commit in trained if commit] == undisturbed
    assert not [finding for verified in verify(ledger) for finding in verified.findings]


def test_no_reader_ever_sees_a_part_of_a_step(run: FaultyRun) -> None:
    assert run.reader.faults == []
    assert run.reader.rounds > 20
    assert len(run.reader.seen) >= ITERATIONS * 7


def test_retries_are_few_and_shown(run: FaultyRun) -> None:
    (line,) = [line for line in run.output.splitlines() if line.startswith("run run: done")]
    shown = int(line.partition("; ")[2].rpartition("; ")[2].split()[0].replace(",", ""))
    assert line.endswith(" store requests tried again")
    # aiohttp opens two connections for a request. Those of the training actor's own store are not shown.
    met = run.happened[Fault.UNAVAILABLE] + run.happened[Fault.TRUNCATE] + run.happened[Fault.OUTAGE] / 2
    assert 0.7 * met < shown < 1.2 * met
    assert run.happened[Fault.UNAVAILABLE] + run.happened[Fault.TRUNCATE] < run.requests / 10
    assert run.happened[Fault.OUTAGE] < 10 * OUTAGE  # waits between tries grow to ten seconds


def test_keys_are_nowhere_in_what_a_run_leaves(run: FaultyRun) -> None:
    left = {path: run.store.read(path) for path in run.store.find(layout.RUNS)}
    left |= {str(path): path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    names = "\n".join(left)
    for part in ("run.json", "prefect.db", "tfevents", "output", "raylet", ".parquet"):
        assert part in names
    for path, data in left.items():
        text = repr(pq.read_table(pa.BufferReader(data)).to_pylist()).encode() if path.endswith(".parquet") else data
        for key in (ACCESS_KEY, SECRET_KEY, SECRET_KEY.rpartition("/")[2]):
            assert key.encode() not in text, f"{key} is in {path}"
