"""Who outlives whom: a started cluster ends with its driver, a joined one keeps its engines for the next driver."""

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from cairn.engines.fleet import cluster
from cairn.engines.fleet.cluster import HEAD, RECONNECT_TIMEOUT, Cluster, ClusterError, _start, head_timeout
from cairn.engines.fleet.reaper import end_processes_writing_in, processes_writing_in
from tests.engines.training.builders import model_folder
from tests.ray_fixtures import ray_head
from tests.shared_memory import segments, watched_segments
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[3]
TRAINER = ("training", "weight_version", "state_digest", "last_input_digest")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


class Driver:
    """A `fleet_driver` process."""

    def __init__(self, model: Path, address: str = "none", dtype: str = "float32", **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.fleet.fleet_driver", str(model), address, dtype, f"{model}.lease"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | environment,
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the driver ended with {self.process.wait(60)}"
        return json.loads(line)

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()


@contextmanager
def driver(model: Path, *args: Any, **environment: str) -> Iterator[Driver]:
    running = Driver(model, *args, **environment)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


@pytest.mark.parametrize(("home", "token"), [("", False), ("/dev/null", True)])
def test_rays_token_is_kept_in_memory_where_the_home_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str, token: bool
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile goes afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", home or str(tmp_path))
    cluster.require_token()
    assert ("RAY_AUTH_TOKEN" in os.environ) is token
    inputs = os.environ.get("RAY_AUTH_TOKEN")
    cluster.require_token()
    assert os.environ.get("RAY_AUTH_TOKEN") == inputs


def test_a_cluster_that_cannot_be_joined_without_a_token_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own error tells nothing of it where a client sends none."""

    def refuse(**options: Any) -> None:
        raise ConnectionError("Failed to connect to GCS. Last connection error: Traceback (most recent call last):")

    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr("ray.init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(
            ClusterError, match=r"joined \(Failed to connect to GCS\): set RAY_AUTH_MODE=token, .*requires a token"
        ):
            cluster._join(address)


@pytest.mark.proof
def test_a_killed_driver_leaves_no_process_no_shared_memory_and_no_folder(model: Path, tmp_path: Path) -> None:
    with (
        watched_segments() as left_segments,
        tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder,
        driver(model, TMPDIR=folder) as killed,
    ):
        state = killed.read()
        (session,) = Path(folder).glob("cairn-*")
        started = [*psutil.Process(killed.process.pid).children(recursive=True)]
        assert {state["rollout"], state["training"]} < {process.pid for process in started}
        assert {state["rollout"], state["training"]} < set(processes_writing_in(str(session)))
        os.kill(state["rollout"], signal.SIGSTOP)  # it cannot see that its driver is gone
        killed.process.kill()
        killed.process.wait(60)
        wait_for(lambda: not any(process.is_running() for process in started) and not session.exists())
        assert not left_segments()


SHARING = """
import time, torch
torch.multiprocessing.set_sharing_strategy("file_system")
shared = torch.ones(1000).share_memory_()
print("shared", flush=True)
time.sleep(600)
"""


@pytest.mark.proof
def test_a_process_that_is_ended_with_its_cluster_leaves_no_shared_memory(tmp_path: Path) -> None:
    before = segments()
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen([sys.executable, "-c", SHARING], stdout=out)
    try:
        wait_for(lambda: (tmp_path / "out").read_text() != "")
        (segment,) = (name for name in segments() - before if name.startswith(f"torch_{process.pid}_"))
        end_processes_writing_in(str(tmp_path))
        assert process.wait(60) == -signal.SIGKILL
        assert segment not in segments()
    finally:
        process.kill()


@pytest.mark.slow
def test_engines_on_a_joined_cluster_outlive_a_killed_driver_and_serve_the_next(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a token would have to be in the home folder
    with ray_head() as address:
        with driver(model, address) as first:
            started = first.read()
            first.tell("train")
            trained = first.read()
        assert trained["weight_version"] == 1
        assert trained["last_input_digest"] == "trained"

        with driver(model, address, "bfloat16") as second:
            result = second.read()
            assert {name: result[name] for name in TRAINER} == {name: trained[name] for name in TRAINER}
            assert result["rollout"] != started["rollout"]  # it was made from another configuration
            assert result["versions"] == [0]
            wait_for(lambda: not psutil.pid_exists(started["rollout"]))
            with driver(model, address, "bfloat16") as third:
                adopted = third.read()
                assert all(adopted[name] == result[name] for name in ("rollout", *TRAINER))
                second.tell("close")
                assert second.process.wait(180) == 0
                third.tell("train")
                assert third.read()["rollout"] == result["rollout"], "a superseded driver closes nothing"
                third.tell("close")
                assert third.process.wait(180) == 0
        engines = (result["rollout"], result["training"])
        wait_for(lambda: not any(psutil.pid_exists(pid) for pid in engines))
        assert resources_in_use(address) == {}


@pytest.mark.parametrize(
    "head",
    [pytest.param("gcs_server", marks=pytest.mark.proof), pytest.param("raylet", marks=pytest.mark.slow)],
)
def test_a_driver_whose_ray_head_died_ends_with_a_sentence_and_leaves_nothing(model: Path, head: str) -> None:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder, driver(model, TMPDIR=folder) as bereft:
        bereft.read()
        below = psutil.Process(bereft.process.pid).children(recursive=True)
        (victim,) = [process for process in below if process.name() == head]
        bereft.tell("hang")
        bereft.read()
        victim.kill()
        assert bereft.process.wait(180) == 1
        assert bereft.process.stdout is not None
        sentence = f"the Ray cluster of this driver is gone: its {head} died, and all engines with it"
        assert bereft.process.stdout.read() == f"ClusterLost: {sentence}\n"
        wait_for(lambda: not any(process.is_running() for process in below) and not list(Path(folder).glob("cairn-*")))


@pytest.mark.proof
def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing() -> None:
    script = (
        "from cairn.engines.fleet.cluster import Cluster\n"
        "Cluster.open(None, num_cpus=1, object_store_memory=1, timeout=60)\n"
    )
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        result = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert re.search(
            r"ClusterError: Ray did not start, twice \(.*object store.*\): .*ray start --head", result.stderr
        )
        wait_for(lambda: not list(Path(folder).glob("cairn-*")))


AFTER_ANOTHER = """
import subprocess, sys, time
from cairn.engines.fleet.cluster import Cluster
dying = subprocess.Popen([sys.argv[1], "10"])
cluster = Cluster.open(None, num_cpus=1, object_store_memory=10**8, timeout=100)
dying.wait()
time.sleep(2)  # for the watch to see it
print(cluster.lost)
cluster.close()
"""


@pytest.mark.slow
def test_the_end_of_a_head_that_was_given_up_is_not_taken_for_the_end_of_the_cluster(tmp_path: Path) -> None:
    stand_in = shutil.copy("/bin/sleep", tmp_path / "gcs_server")
    command = [sys.executable, "-c", AFTER_ANOTHER, str(stand_in)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=True)
    assert result.stdout == "None\n"


def test_an_address_where_nothing_answers_is_refused_with_the_way_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"nothing responds at fleet.ray_address={address} .*ray start --head"):
            Cluster.open(address, num_cpus=1, object_store_memory=1, timeout=30)


def test_a_ray_client_address_is_refused_with_the_way_out() -> None:
    with pytest.raises(ClusterError, match="set host:port or auto"):
        Cluster.open("ray://127.0.0.1:10001", num_cpus=1, object_store_memory=1, timeout=30)


def test_a_cluster_of_its_own_is_refused_where_it_would_take_up_the_state_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_REDIS_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ClusterError, match="Set it for `ray start --head` alone"):
        _start(1, 1, 30, None)


def test_a_silent_head_is_given_up_before_ray_ends_this_process_or_its_raylet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RECONNECT_TIMEOUT, raising=False)
    with subprocess.Popen(["sleep", "60"], env={RECONNECT_TIMEOUT: "300"}) as process:
        raylet = psutil.Process(process.pid)
        wait_for(lambda: RECONNECT_TIMEOUT in raylet.environ())
        assert head_timeout([]) == 40
        assert head_timeout([raylet]) == 40
        monkeypatch.setenv(RECONNECT_TIMEOUT, "600")
        assert head_timeout([]) == 580
        assert head_timeout([raylet]) == 280
        process.kill()


def test_a_process_has_one_cluster_which_ends_with_its_last_user(ray_cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="close its fleet before"):
        Cluster.open("auto", num_cpus=1, object_store_memory=1, timeout=30)
    repeated = Cluster.open(None, num_cpus=1, object_store_memory=1, timeout=30)
    assert repeated is ray_cluster
    repeated.close()
    assert ray_cluster.folder is not None
    assert processes_writing_in(str(ray_cluster.folder))


def resources_in_use(address: str) -> dict[str, float]:
    """Resources that actors or placement groups hold."""
    script = (
        "import ray, json, time\n"
        f"ray.init(address={address!r}, log_to_driver=False, logging_level='error')\n"
        "total = ray.cluster_resources()\n"
        "end = time.monotonic() + 60\n"
        "while (used := {k: v - ray.available_resources().get(k, 0) for k, v in total.items()"
        " if k in ('CPU', 'GPU') and v != ray.available_resources().get(k, 0)}) and time.monotonic() < end:\n"
        "    time.sleep(0.2)\n"
        "print(json.dumps(used))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True)
    return json.loads(result.stdout)


@pytest.mark.parametrize("head", ["gcs_server", "raylet"])
def test_a_part_of_the_head_that_ended_before_it_was_watched_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    stand_ins = {name: subprocess.Popen([shutil.copy("/bin/sleep", tmp_path / name), "60"]) for name in HEAD}
    listed = [psutil.Process(stand_in.pid) for stand_in in stand_ins.values()]
    monkeypatch.setattr(cluster, "head_processes", lambda: listed)
    stand_ins[head].kill()
    stand_ins[head].wait()
    started = Cluster(None, tmp_path)
    try:
        started.watch()
    finally:
        for stand_in in stand_ins.values():
            stand_in.kill()
            stand_in.wait()
    assert started.lost == f"the Ray cluster of this driver is gone: its {head} died, and all engines with it"


def test_who_reads_a_log_of_an_ended_cluster_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "session_1" / "logs" / "raylet.err"
    log.parent.mkdir(parents=True)
    log.write_text("an error\n")
    with log.open("a") as written, subprocess.Popen(["tail", "--follow", log], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"an error\n"
        with subprocess.Popen(["sleep", "600"], stdout=written) as writer:
            written.close()
            end_processes_writing_in(str(tmp_path))
            assert writer.wait() == -signal.SIGKILL
        assert reader.poll() is None
        reader.kill()


def test_shared_memory_of_a_worker_that_ended_before_the_reaper_looked_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended, subprocess.Popen(["sleep", "600"]) as other:
        ended.wait()
        logs = tmp_path / "session_1" / "logs"
        logs.mkdir(parents=True)
        for worker in (ended.pid, other.pid):  # the other process was given the number of a worker
            (logs / f"worker-{worker:056x}-01000000-{worker}.out").touch()
        left, retained = (Path("/dev/shm", f"torch_{process.pid}_{uuid.uuid4().int}_0") for process in (ended, other))
        left.touch()
        retained.touch()
        try:
            end_processes_writing_in(str(tmp_path))
            assert not left.exists()
            assert retained.exists()
            assert other.poll() is None
        finally:
            left.unlink(missing_ok=True)
            retained.unlink()
            other.kill()


def test_rays_token_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile goes afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".ray" / "auth_token"
    cluster.require_token()
    made = file.read_text()
    assert (len(made), stat.filemode(file.stat().st_mode)) == (64, "-rw-------")
    file.chmod(0o644)
    cluster.require_token()
    assert (file.read_text(), stat.filemode(file.stat().st_mode)) == (made, "-rw-------"), "one that Ray made before"
    assert [path.name for path in file.parent.iterdir()] == ["auth_token"]
    file.unlink()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    cluster.require_token()
    assert not file.exists()
