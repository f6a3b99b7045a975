"""The Ray cluster under a fleet: started for this process alone, or joined by its address.

started    private, with a folder of its own for sockets and logs; ends with this process, however the process ends
           (see cairn.engines.fleet.reaper)
joined     started by others; left running; this process gives it up when its head is silent for long

A process has one cluster at a time. The last user of the cluster releases it by closing it.
"""

import logging
import math
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import ray
from ray.exceptions import AuthenticationError

from cairn.engines.fleet import reaper
from cairn.engines.fleet.lean import only_what_runs_actors, workers_from
from cairn.engines.fleet.object_store import reserve
from cairn.engines.fleet.warm import WarmProcess
from cairn.engines.types.errors import ClusterLost, EngineError
from cairn.storage.store.errors import NoSpace

# Health of a Ray cluster: whether its processes live, whether its head responds, whether its machines stay.


HEAD = ("gcs_server", "raylet")
"""Processes that no cluster can be without. If one dies, Ray waits for its return, for a minute or for ever."""

LOOK_INTERVAL = 0.5
"""Seconds within which a watch of these processes notices that the cluster was closed."""

RECONNECT_TIMEOUT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's environment variable with the seconds of silence of the head after which Ray ends a process without a message.
Every process reads it when it starts. The same option of `ray start --system-config` comes too late for it."""

USUAL_RECONNECT_TIMEOUT = 60.0
"""Ray's value for a process without that variable."""

HEAD_MARGIN = 20.0
"""Seconds between the moment at which a silent head is given up, and the end of the process by Ray."""

HEAD_INTERVAL = 5.0
"""Seconds between two checks of the head, and the timeout of one check."""

JOIN_TIMEOUT = 10.0
"""Seconds within which a cluster to be joined must respond. Ray itself waits two minutes for an address that does not
respond, and then ends the process."""


def first_to_die(processes: Sequence[psutil.Process], names: Sequence[str], closing: threading.Event) -> str | None:
    """Return the name of the first of these processes, one of each name, that dies or is dead; None if `closing` is set
    before."""
    with ExitStack() as stack:
        ends = select.poll()
        names_by_descriptor: dict[int, str] = {}
        for process in processes:
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                descriptor = os.pidfd_open(process.pid)
                stack.callback(os.close, descriptor)
                names_by_descriptor[descriptor] = process.name()
                ends.register(descriptor, select.POLLIN)
        died = [name for name in names if name not in names_by_descriptor.values()]
        while not died and not closing.is_set():
            died = [names_by_descriptor[descriptor] for descriptor, _ in ends.poll(LOOK_INTERVAL * 1000)]
    return None if closing.is_set() else died[0]


def head_processes() -> list[psutil.Process]:
    """Return the processes of the head that this process has started."""
    processes = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has ended since
            if child.name() in HEAD:
                processes.append(child)
    return processes


def raylet_here() -> Iterator[psutil.Process]:
    """Yield the raylet by which this process takes part in a cluster, if the raylet is visible."""
    node = f"--node_id={ray.get_runtime_context().get_node_id()}"
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.name() == "raylet" and node in process.cmdline():
                yield process


def head_timeout(raylets: Sequence[psutil.Process]) -> float:
    """Return the seconds of silence after which the head of a joined cluster is given up: before Ray ends this process,
    or the raylet by which it takes part in the cluster."""
    environments: list[Mapping[str, str]] = [os.environ]
    for raylet in raylets:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or another user started it
            environments.append(raylet.environ())
    timeouts = [float(variables.get(RECONNECT_TIMEOUT, USUAL_RECONNECT_TIMEOUT)) for variables in environments]
    return max(HEAD_INTERVAL, min(timeouts) - HEAD_MARGIN)


def connection_error(address: str, timeout: float) -> Exception | None:
    """Return why nothing responds at `host:port`; None if something does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except (OSError, ValueError) as error:
        return error
    return None


def seconds_until_drained(nodes: Collection[str]) -> float | None:
    """Return the seconds until the cluster drains the first of these nodes: infinite if no time is set, None if it
    drains none."""
    draining_nodes = draining()
    ends = [draining_nodes[node] / 1000 or math.inf for node in nodes if node in draining_nodes]
    return max(0.0, min(ends) - time.time()) if ends else None


def draining() -> dict[str, int]:
    """Return the nodes that are to be drained, by id, and when, in milliseconds of Unix time; 0 if no time is set."""
    return ray._private.state.state.get_draining_nodes()  # as in Ray Serve and Ray Train


def living_nodes() -> set[str]:
    """Return the ids of the cluster's living nodes."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def machine_resources() -> list[dict[str, float]]:
    """Return Ray's resources of each of the cluster's living nodes."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


NAMESPACE = "cairn"
"""Ray namespace of all actors and placement groups."""

MAX_FOLDER_LENGTH = 40
"""Most characters in the path of the cluster's folder. Ray adds up to 64 for a Unix socket, and Linux limits the whole
path to 107."""


Answer = TypeVar("Answer")


class ClusterError(EngineError):
    """No cluster is available, or it lacks what was requested."""


@dataclass
class Cluster:
    """This process's connection to Ray."""

    address: str | None
    """The address that was requested; None for a cluster that was started."""
    folder: Path | None = None
    """Folder with the sockets and logs of a cluster that was started."""
    _reaper: "subprocess.Popen[bytes] | None" = None
    _warm: WarmProcess | None = None
    _closing: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _querying: threading.Lock = field(default_factory=threading.Lock)
    _users: int = 0
    lost: str | None = None
    """Reason why the cluster is gone or was given up; None while it is in use."""
    report: Callable[[str], None] = lambda sentence: None
    """Callback for a sentence on a head that is silent, and one on its return."""

    @property
    def joined(self) -> bool:
        """Whether the cluster outlives this process."""
        return self.address is not None

    @staticmethod
    def open(
        address: str | None,
        *,
        num_cpus: int,
        object_store_memory: int,
        timeout: float,
        make_warm: Callable[[], WarmProcess | None] = lambda: None,
    ) -> "Cluster":
        """Start a cluster, join one, or share the one that this process has.

        Args:
            address: address of the cluster to join: `host:port`, or `auto` for the one on this machine. None starts
                one.
            num_cpus: CPUs that a started cluster offers. They only count reservations; more than the machine has do no
                harm.
            object_store_memory: bytes of a started cluster's object store, in shared memory, all taken at once.
            timeout: seconds for each of the two attempts to start a cluster.
            make_warm: returns the process from which a started cluster's workers are forked.

        Raises:
            ClusterError: the cluster cannot be started, reached, or shared.
            NoSpace: the object store has no room.
        """
        global _current
        with _lock:
            if _current is None:
                if ray.is_initialized():
                    raise ClusterError(
                        "Ray is already in use in this process, outside of a fleet: call ray.shutdown() first, or join "
                        "that cluster from a process of its own with fleet.ray_address"
                    )
                if address is None:
                    _current = _start(num_cpus, object_store_memory, timeout, make_warm())
                else:
                    _current = _join(address)
            elif _current.address != address:
                raise ClusterError(
                    f"this process uses the cluster {_current.address or 'that it started'}; close its fleet before "
                    f"you start one with fleet.ray_address={address}"
                )
            _current._users += 1
            return _current

    def start_workers_with(self, num_threads: int | None) -> None:
        """End the warm process unless its forks have this number of OpenMP threads. Workers that start without it set
        their own number before they import PyTorch. `num_threads` is None where workers differ."""
        if self._warm is not None and self._warm.num_threads != num_threads:
            self._warm.close()
            self._warm = None

    def watch(self) -> None:
        """End the rest of a started cluster once a process of its head has died, so that no call waits for the cluster.

        This must happen at once: Ray ends, without a message, the first process that touches the object store of a dead
        raylet.
        """
        name = first_to_die(head_processes(), HEAD, self._closing)
        if name is not None:
            self.lost = f"the Ray cluster of this driver is gone: its {name} died, and all engines with it"
            reaper.end_processes_writing_in(str(self.folder))

    def watch_raylet(self, address: str, raylet: psutil.Process) -> None:
        """Give up a joined cluster whose raylet on this machine has died, at once for the same reason."""
        if first_to_die([raylet], HEAD[1:], self._closing) is not None:
            self.lost = (
                f"the Ray cluster at {address} is out of reach: its raylet on this machine died; nothing committed is "
                "lost: start Ray here again and resume"
            )

    def watch_head(self, address: str, timeout: float) -> None:
        """Give up a joined cluster whose head is silent for `timeout` seconds. Calls to engines do not need the head.
        Ray holds other calls until it is back."""
        silent_since: float | None = None
        reported = False
        while not self._closing.wait(HEAD_INTERVAL) and self.lost is None:
            checked_at = time.monotonic()
            if connection_error(address, HEAD_INTERVAL) is None:
                if reported and silent_since is not None:
                    seconds = time.monotonic() - silent_since
                    self.report(f"The head of the Ray cluster responds again, after {seconds:.0f} s.")
                silent_since, reported = None, False
                continue
            silent_since = silent_since or checked_at
            if time.monotonic() - silent_since > timeout:
                self.lost = (
                    f"the head of the Ray cluster does not respond at {address} for {timeout:.0f} s; the engines "
                    "keep their work: resume when it is back"
                )
                return
            if not reported:
                self.report(
                    f"The head of the Ray cluster does not respond at {address}. The run waits {timeout:.0f} s for it."
                )
                reported = True

    def answer(self, question: Callable[[], Answer]) -> Answer | None:
        """Return Ray's answer to a question that may come late; None once the cluster was released or given up. In that
        case Ray itself would start another cluster to answer, and end the process in the middle of that."""
        with self._querying:
            return None if self._closing.is_set() or self.lost is not None else question()

    def close(self) -> None:
        """Release the cluster. Its last user leaves a joined cluster and ends a started one."""
        global _current
        with _lock:
            self._users -= 1
            if self._users:
                return
            _current = None
            self._closing.set()
            acquired = self._querying.acquire(timeout=HEAD_INTERVAL)  # a query of a silent head takes a minute
            ray.shutdown()
            if acquired:
                self._querying.release()
            self._ended.set()
            if self._warm is not None:
                self._warm.close()
            if self._reaper is not None and self.folder is not None:
                self._reaper.communicate(b"closed", timeout=30)
                shutil.rmtree(self.folder, ignore_errors=True)


_lock = threading.Lock()
_current: Cluster | None = None


def require_cluster() -> None:
    """Raise ClusterLost if the cluster that this process uses is gone, given up or released."""
    cluster = _current
    if cluster is not None and cluster.lost is not None:
        raise ClusterLost(cluster.lost)
    if not ray.is_initialized():  # a call of Ray would start another cluster
        raise ClusterLost("this process has released its Ray cluster and all its engines")


def ray_folder() -> Path | None:
    """Return the folder with the files of the cluster that this process started; None for a joined cluster."""
    return None if _current is None else _current.folder


def _join(address: str) -> Cluster:
    if address.startswith("ray://"):
        raise ClusterError(
            f"fleet.ray_address={address} is for Ray Client, which cannot stream results: run the driver on a node of "
            "the cluster and set host:port or auto"
        )
    if address != "auto" and (error := connection_error(address, JOIN_TIMEOUT)):
        raise ClusterError(
            f"nothing responds at fleet.ray_address={address} ({error}): start a cluster there with "
            "`ray start --head`, or leave ray_address empty"
        ) from error
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        ray.shutdown()
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        way_out = "start one with `ray start --head`, or leave ray_address empty"
        show = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH unless its token is in ~/.ray/auth_token"
        if isinstance(cause, AuthenticationError):
            way_out = show
        elif os.environ.get("RAY_AUTH_MODE") is None:  # a head that requires a token does not answer calls without one
            way_out = f"{show}, if it requires a token, as `ray start --head` does by default; or {way_out}"
        raise ClusterError(
            f"the Ray cluster at fleet.ray_address={address} cannot be joined ({_first_line(cause)}): {way_out}"
        ) from error
    cluster = Cluster(address)
    head = ray.get_runtime_context().gcs_address
    raylets = list(raylet_here())
    watching_head = (head, head_timeout(raylets))
    threading.Thread(target=cluster.watch_head, args=watching_head, name="ray-head", daemon=True).start()
    for raylet in raylets:
        watching = threading.Thread(target=cluster.watch_raylet, args=(head, raylet), name="raylet", daemon=True)
        watching.start()
    return cluster


def _start(num_cpus: int, object_store_memory: int, timeout: float, warm: WarmProcess | None) -> Cluster:
    if "RAY_REDIS_ADDRESS" in os.environ:
        raise ClusterError(
            "RAY_REDIS_ADDRESS is set: a cluster of this run alone would keep its state where other clusters keep "
            "theirs. Set it for `ray start --head` alone, or join that cluster with fleet.ray_address=auto"
        )
    require_token()
    folder = _new_folder()
    command = [sys.executable, "-I", "-S", reaper.__file__, str(folder), str(os.getpid())]
    nowhere = subprocess.DEVNULL
    watching = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, cwd="/", start_new_session=True
    )
    cluster = Cluster(None, folder, watching, warm)

    def start() -> None:
        # Otherwise the end of an earlier cluster would be taken for the end of this one.
        psutil.wait_procs(head_processes(), timeout)
        with only_what_runs_actors(), nullcontext() if warm is None else workers_from(warm.address):
            ray.init(
                address="local",  # whatever RAY_ADDRESS says
                num_cpus=num_cpus,
                object_store_memory=object_store_memory,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace=NAMESPACE,
                _temp_dir=str(folder),
                # Ray must not kill an engine because another program on the machine uses memory. Nor may an engine wait
                # for all that other programs compute: by default Ray runs it at niceness 15.
                _system_config={
                    "memory_monitor_refresh_ms": 0,
                    "worker_niceness": 0,
                    "raylet_start_wait_time_s": 120,
                },
            )

    try:
        try:
            _in_lasting_thread(start, cluster._ended, timeout)
        # On a loaded machine Ray gives up after 30 seconds, with a bare Exception. Caches are warm at the second
        # attempt.
        except Exception:
            ray.shutdown()
            _in_lasting_thread(start, cluster._ended, timeout)
    except Exception as error:
        ray.shutdown()
        raise ClusterError(
            f"Ray did not start, twice ({_first_line(error)}): the machine may be overloaded or short of memory; its "
            f"logs are under {folder} while this process lives. Try again, or start a cluster with `ray start --head` "
            "and set fleet.ray_address=auto"
        ) from error
    try:
        for process in head_processes():
            reserve(process.pid)
    except NoSpace:
        ray.shutdown()
        cluster._ended.set()
        raise
    threading.Thread(target=cluster.watch, name="ray-head", daemon=True).start()
    return cluster


def _in_lasting_thread(work: Callable[[], None], end: threading.Event, timeout: float) -> None:
    """Do the work in a thread that lasts until `end` is set, or only as long as the work if the work fails.

    Linux ends Ray's processes together with the thread that started them, so that thread must not end earlier.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
            end.wait()

    threading.Thread(target=run, name="ray", daemon=True).start()
    done.result(timeout)


def _new_folder() -> Path:
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(parent) <= MAX_FOLDER_LENGTH - len("/cairn-12345678"):
            return Path(tempfile.mkdtemp(prefix="cairn-", dir=parent))
    raise ClusterError(f"the path of the temporary folder {tempfile.gettempdir()} is too long for Ray's sockets")


def require_token() -> None:
    """Give Ray a token that only its owner can read, for the clusters that it starts. The token is stored in
    `~/.ray/auth_token`, where Ray would make one that everybody on the machine can read. If the home folder cannot
    store one, the token is in the environment of this process and its children."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    if any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return
    try:
        file = Path.home() / ".ray" / "auth_token"
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            _write_token(file)
        with suppress(PermissionError):  # another user owns it
            file.chmod(0o600)
        is_stored = os.access(file, os.R_OK)
    except (OSError, RuntimeError):
        is_stored = False
    if not is_stored:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _write_token(file: Path) -> None:
    """Write the whole file at once, unless another process does so first."""
    descriptor, made = tempfile.mkstemp(dir=file.parent)  # readable by its owner alone
    try:
        with os.fdopen(descriptor, "w") as opened:
            opened.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(made, file)
    finally:
        os.unlink(made)


def _first_line(error: BaseException) -> str:
    first = next(iter(str(error).splitlines()), "").partition(". Last connection error: Traceback")[0]
    return first or type(error).__name__
