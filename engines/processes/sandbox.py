"""Execution of an untrusted program in a sandbox of bubblewrap, isolated from this machine.

| a program cannot | because of |
|---|---|
| reach a network | `--unshare-all`: a network namespace without a way out; no sockets that bypass it |
| see the environment or the processes of this machine | `--clearenv`; a PID namespace |
| see its files or devices | it has `/usr`, the interpreter and five devices that hold nothing |
| change the kernel's settings | `/proc` is read-only, and the program is never root outside (`bubblewrap.py`) |
| write anywhere but in its scratch folder and /dev/shm | both are memory of bounded size, and are deleted with it |
| gain privileges | `--cap-drop ALL`, user nobody, `--disable-userns`, no new privileges |
| have keys, or what else no namespace isolates | a seccomp filter (`bubblewrap.py`) |
| compute, or wait, without end | `RLIMIT_CPU`, and a wall-clock timeout that kills all of its processes |
| take all memory, or start processes without end | `RLIMIT_AS` for each process, and limits for all (`bounds.py`) |
| write without end | `RLIMIT_FSIZE`, the size of its folders, a limit on the output that is read |
| outlive this process, or kill it | `--die-with-parent`; it sees no process but its own |

Kernel vulnerabilities are out of scope. A driver that is killed leaves empty cgroups.

| how a program ends | result |
|---|---|
| by itself, at a timeout, at the limit of its output or of its memory | `Ran` |
| its sandbox ends without a status, `LOST` times, although a test program runs | `Ran` with `lost` |
| the test program does not run either | a failure of the machine: SandboxFailed |
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from cairn.engines.processes.bounds import CHECK_INTERVAL, Bounds, bounds, counted_by_the_kernel
from cairn.engines.processes.bubblewrap import SCRATCH, Bubblewrap, Confined

__all__ = ["LOST", "Confined", "Ran", "Sandbox", "SandboxFailed"]

LOST = 3
"""Number of sandboxes in a row that may end without a status."""


class SandboxFailed(Exception):
    """The sandbox did not start, although this machine has sandboxes: it lacks resources."""


@dataclass(frozen=True)
class Ran:
    """Result of a program."""

    output: bytes
    """Standard output, cut at the limit."""
    code: int
    """Exit code; negative for a signal."""
    late: bool
    """Whether the program was killed at its timeout."""
    flooded: bool
    """Whether the program printed more than the limit."""
    errors: bytes
    """Standard error, cut at the limit."""
    out_of_memory: bool = False
    """Whether the program was killed at its memory limit."""
    lost: bool = False
    """Whether its sandbox was killed from outside, or did not start, each time, while those of other programs work."""


class Sandbox:
    """Runs programs, each in a sandbox of its own. Raises BadPlugin where this machine has no sandboxes."""

    def __init__(self, config: Confined) -> None:
        self._config = config
        self._bubblewrap = Bubblewrap(config)
        self.bounds_all = counted_by_the_kernel()
        """Whether the kernel limits processes and memory of all processes of a program together."""

    async def run(self, program: bytes, stdin: bytes) -> Ran:
        """Run a Python program. Raises the errors of `execute`."""
        path = f"{SCRATCH}/program.py"
        return await self.execute([self._config.interpreter, "-I", "-S", path], stdin, program, path)

    async def execute(
        self, command: Sequence[str], stdin: bytes, file: bytes = b"", path: str = f"{SCRATCH}/.file"
    ) -> Ran:
        """Run a command, with a `file` at `path`.

        Where its sandbox is killed from outside, the command runs again: it has changed nothing. Raises SandboxFailed,
        and OSError where the machine lacks resources.
        """
        for _ in range(LOST):
            ran, began = await self._once(command, stdin, file, path)
            if began or ran.late or ran.flooded or ran.out_of_memory:
                return ran
        if why := await asyncio.to_thread(self._bubblewrap.works):
            raise SandboxFailed(f"the sandbox of {self._config.user} did not start (exit code {ran.code}): {why}")
        return replace(ran, lost=True)

    async def _once(self, command: Sequence[str], stdin: bytes, file: bytes, path: str) -> tuple[Ran, bool]:
        """Run a command once; return the result, and whether bwrap reported an exit status."""
        config, end = self._config, asyncio.get_running_loop().time() + self._config.seconds
        within = bounds(config.memory_of_all, config.processes)
        pipes = [os.pipe() for _ in range(3)]
        (read, write), (status, status_write), (rules, rules_write) = pipes
        child_fds, own_fds = [read, status_write, rules], [write, status, rules_write]
        try:
            os.write(rules_write, self._bubblewrap.filter)  # a pipe holds it
            os.close(own_fds.pop())
            options = ["--json-status-fd", str(status_write), "--seccomp", str(rules), "--file", str(read), path]
            process = await asyncio.create_subprocess_exec(
                *self._bubblewrap.command(within, options, list(command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=child_fds,
                env={},
                cwd="/",
                start_new_session=True,
            )
            while child_fds:
                os.close(child_fds.pop())
            own_fds.remove(write)
            feeding = asyncio.gather(_feed(process, stdin), asyncio.to_thread(_put, write, file))
            clearing = asyncio.create_task(_clear(process, within))
            enforcing = asyncio.create_task(_enforce(process, within))
            bound = config.file_size
            output, errors = bytearray(), bytearray()
            late = False
            try:
                async with asyncio.timeout_at(end):
                    await asyncio.gather(
                        _take(process.stdout, output, bound, process), _take(process.stderr, errors, bound, process)
                    )
                    await process.wait()
            except TimeoutError:
                late = True
            finally:
                _end(process)
                within.kill()
                await process.wait()
                enforcing.cancel()
                feeding.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await feeding
                await clearing
            own_fds.remove(status)
            with os.fdopen(status, "rb") as report:
                began = b"exit-code" in report.read(2**12)
            ended_well = began and process.returncode == 0  # though a process of its own was killed
            out_of_memory = within.exceeded() and not ended_well
        finally:
            for fd in (*child_fds, *own_fds):
                os.close(fd)
            await asyncio.to_thread(within.remove)
        assert process.returncode is not None
        flooded = max(len(output), len(errors)) > bound
        ran = Ran(bytes(output[:bound]), process.returncode, late, flooded, bytes(errors[:bound]), out_of_memory)
        return ran, began


async def _enforce(process: asyncio.subprocess.Process, within: Bounds) -> None:
    while process.returncode is None:
        await asyncio.to_thread(within.enforce, process.pid)
        await asyncio.sleep(CHECK_INTERVAL)


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


def _put(fd: int, data: bytes) -> None:
    with suppress(BrokenPipeError), os.fdopen(fd, "wb") as pipe:
        pipe.write(data)


async def _take(
    stream: asyncio.StreamReader | None, into: bytearray, bound: int, process: asyncio.subprocess.Process
) -> None:
    assert stream is not None
    while data := await stream.read(2**16):
        if len(into) > bound:  # the rest of what is in the pipe
            continue
        into += data
        if len(into) > bound:
            _end(process)


async def _clear(process: asyncio.subprocess.Process, within: Bounds) -> None:
    """Kill what outlives the sandbox.

    A sandbox that is killed while it starts leaves a process that is not yet tied to it, waits for it forever, and
    holds its pipes, for which `process.wait` would wait.
    """
    with suppress(ProcessLookupError), os.fdopen(os.pidfd_open(process.pid)) as ended:
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(ended, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(ended)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    within.kill()


def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the first process; all others of its namespace end with it."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
