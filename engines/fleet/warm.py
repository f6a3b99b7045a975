"""A process that has imported what engines need, and from which the workers of a cluster are forked.

    python -P -m cairn.engines.fleet.warm LISTENER DRIVER_PID MODULE…        stdin: a pipe that the driver holds open

An engine's process needs seconds of CPU time to import PyTorch, but only half a second as a fork of a process that has
imported it. Ray starts a worker by a command. On a driver's own cluster that command is `cairn.engines.fleet.launch`.
It passes the worker's arguments, environment and open files to this process, whose fork becomes the worker. If this
process does not accept them, the command starts the worker as Ray does.

Values that are read while modules are imported are the same for all forks, above all OpenMP's number of threads. So
there is one such process, for engines with one number of threads, and on CPUs only: a fork cannot use a GPU that its
parent has accessed.
"""

import argparse
import json
import os
import runpy
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cairn.engines.fleet.address import ray_address
from cairn.engines.processes.deferred import collecting_later, defer_compiler

if TYPE_CHECKING:
    from cairn.configs.schema.run import RunConfig

THREADS = "CAIRN_WARM_THREADS"
"""Environment variable of a fork with OpenMP's number of threads."""

INHERITED = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", THREADS)
"""Environment variables that a fork takes from this process, because they were read when PyTorch was imported."""


class WarmProcess:
    """The driver's handle on the warm process, which ends with the driver."""

    def __init__(self, modules: Sequence[str], num_threads: int) -> None:
        """Start the process, and return at once.

        Args:
            modules: modules that the process imports.
            num_threads: OpenMP threads in all its forks.
        """
        self.num_threads = num_threads
        self.address = f"cairn-{os.getpid()}-{secrets.token_hex(8)}"
        threads = str(num_threads)
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "OMP_NUM_THREADS": threads, THREADS: threads}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{self.address}")
            listener.listen(128)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(listener.fileno()), str(os.getpid()), *modules],
                env=environment,
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the process. Its forks stay; workers that start from now on are not forks."""
        self._process.kill()
        self._process.communicate()


_prepared: WarmProcess | None = None


def prepare(config: "RunConfig") -> None:
    """Begin to start the process that a fleet of this configuration will take, if it will take one."""
    global _prepared
    if _prepared is None:
        _prepared = _made_for(config)


def take(config: "RunConfig") -> WarmProcess | None:
    """Return the process for a fleet of this configuration. The caller owns it from now on. None where engines start
    without one."""
    global _prepared
    prepared, _prepared = _prepared, None
    return prepared or _made_for(config)


def threads_of(config: "RunConfig") -> int | None:
    """Return the number of threads of each engine; None where engines differ in it, or cannot be forks."""
    rollout, training = config.rollout, config.training
    models = [] if config.reward.reward_model is None else [config.reward.reward_model]
    on_gpus = rollout.num_gpus_per_engine or training.num_gpus_per_rank or any(model.num_gpus for model in models)
    numbers = {rollout.num_threads, training.num_threads, *(model.num_threads for model in models)}
    # PyTorch reads some variables when it is imported.
    return None if on_gpus or training.train_env_vars or len(numbers) > 1 else training.num_threads


def _made_for(config: "RunConfig") -> WarmProcess | None:
    from cairn.engines.rollout.plan import kind_of

    rollout, training, num_threads = config.rollout, config.training, threads_of(config)
    if ray_address(config.fleet) is not None or num_threads is None:
        return None
    modules = [kind_of(rollout.engine).engine.partition(":")[0], "cairn.engines.training.factory"]
    if training.engine == "torch":
        modules.append("cairn.engines.training.torch.engine")
    return WarmProcess(modules, num_threads)


def _serve(listener: socket.socket, parent: int) -> dict[str, Any] | None:
    """Fork for every launcher that connects, until the driver is gone. Returns in a fork, with the worker that it is to
    become; returns None in the process itself."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps forks
    while os.getppid() == parent:
        # The parent is checked too: a child that the driver forked keeps the pipe open after the driver's end.
        ready, _, _ = select.select([listener, sys.stdin], [], [], 1.0)
        if sys.stdin in ready:
            break
        if listener not in ready:
            continue
        with listener.accept()[0] as launcher:
            request = _read(launcher)
            if request is None:
                continue
            if os.fork() == 0:
                return request
            for descriptor in request["files"]:
                os.close(descriptor)
            launcher.sendall(b"forked")
    return None


def _read(connection: socket.socket) -> dict[str, Any] | None:
    """Return the message of a launcher (see `cairn.engines.fleet.launch`); None if another user sent it, or if it is
    incomplete."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    if user != os.getuid():
        return None
    first, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    parts = [first]
    while parts[-1]:
        parts.append(connection.recv(1 << 16))
    try:
        return {**json.loads(b"".join(parts)), "files": files}
    except ValueError:  # it was ended meanwhile
        for descriptor in files:
            os.close(descriptor)
        return None


def _become(request: dict[str, Any]) -> None:
    """Become the worker that Ray wanted to start."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, descriptor in enumerate(request["files"]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["folder"])
    own = {name: os.environ[name] for name in INHERITED if name in os.environ}
    os.environ.clear()
    os.environ.update(request["environment"] | own)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all forks draw the same
    sys.argv = request["arguments"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(prog="cairn.engines.fleet.warm")
    parser.add_argument("listener", type=int, help="file descriptor of a listening socket")
    parser.add_argument("parent", type=int, help="process id of the driver")
    parser.add_argument("modules", nargs="*", help="modules to import")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    defer_compiler()
    with collecting_later():  # also in forks: each would copy all pages that they share
        for module in arguments.modules:
            import_module(module)
    with socket.socket(fileno=arguments.listener) as listener:
        request = _serve(listener, arguments.parent)
    if request is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _become(request)


if __name__ == "__main__":
    main()
