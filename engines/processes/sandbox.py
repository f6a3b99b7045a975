"""A program that is not trusted, in a sandbox of bubblewrap: one run of it, with nothing of this machine.

| what a program may not | is held by |
|---|---|
| reach a network | `--unshare-all`: a network of its own, with no way out; no sockets that lead around it |
| see the environment or the processes of this machine | `--clearenv`; a namespace of processes of its own |
| see its files or devices | there are `/usr`, the interpreter and five devices that hold nothing |
| change the kernel's settings | `/proc` is read-only, and the program is never root outside (`bubblewrap.py`) |
| write anywhere but in its scratch folder and /dev/shm | which are memory, of bounded size, and go with it |
| gain rights | `--cap-drop ALL`, nobody's user, `--disable-userns`, no new privileges |
| have keys, or what else no namespace separates | a filter (`system_calls.py`) |
| compute, or wait, without end | `RLIMIT_CPU`, and a deadline on the wall clock, which ends all of its processes |
| take the memory, or start processes without end | `RLIMIT_AS` for each process, and bounds for all (`bounds.py`) |
| write without end | `RLIMIT_FSIZE`, the size of its folders, a bound on what is read of its output |
| outlive this process, or end it | `--die-with-parent`; it sees no process but its own |

What it does not hold: a hole in the kernel. A driver that is killed leaves empty cgroups.

| how a program ends | what that is |
|---|---|
| by itself, at a deadline, at the bound of its output or of its memory | its result |
| its sandbox ends without a status, `LOST` times, and a program of ours runs then | its result, too: `lost` |
| neither runs | the machine's failure: SandboxFailed |
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from cairn.engines.processes.bounds import LOOK, Bounds, bounds, counted_by_the_kernel
from cairn.engines.processes.bubblewrap import SCRATCH, Bubblewrap, Confined

__all__ = ["LOST", "Confined", "Ran", "Sandbox", "SandboxFailed"]

LOST = 3
"""Sandboxes that may end over a program without a status."""


class SandboxFailed(Exception):
    """The sandbox did not start, though sandboxes do here: the machine has no room."""


@dataclass(frozen=True)
class Ran:
    """How a program ended."""

    output: bytes
    """What it printed, cut off at the bound."""
    code: int
    """Exit code; negative for a signal."""
    late: bool
    """It was ended at the deadline."""
    flooded: bool
    """It printed more than the bound."""
    errors: bytes
    """What it wrote to stderr, likewise."""
    out_of_memory: bool = False
    """It was ended at the bound of its memory."""
    lost: bool = False
    """Its sandbox was ended from outside, or did not start, each time, where those of other programs do."""


class Sandbox:
    """Runs programs, each in a sandbox of its own. Raises BadPlugin where this machine makes none."""

    def __init__(self, config: Confined) -> None:
        self._config = config
        self._bubblewrap = Bubblewrap(config)
        self.bounds_all = counted_by_the_kernel()
        """Whether the kernel counts processes and memory of all processes of a program."""

    async def run(self, program: bytes, stdin: bytes) -> Ran:
        """Run a Python program. Raises as `execute` does."""
        path = f"{SCRATCH}/program.py"
        return await self.execute([self._config.interpreter, "-I", "-S", path], stdin, program, path)

    async def execute(
        self, command: Sequence[str], stdin: bytes, file: bytes = b"", path: str = f"{SCRATCH}/.file"
    ) -> Ran:
        """Run a command; there is a file at `path`. Where its sandbox is ended from outside it is run again: it has
        changed nothing. Raises SandboxFailed, and OSError where the machine has no room."""
        for _ in range(LOST):
            ran, began = await self._once(command, stdin, file, path)
            if began or ran.late or ran.flooded or ran.out_of_memory:
                return ran
        if why := await asyncio.to_thread(self._bubblewrap.works):
            raise SandboxFailed(f"the sandbox of {self._config.user} did not start (exit code {ran.code}): {why}")
        return replace(ran, lost=True)

    async def _once(self, command: Sequence[str], stdin: bytes, file: bytes, path: str) -> tuple[Ran, bool]:
        """How it ended, and whether bwrap says so."""
        config, end = self._config, asyncio.get_running_loop().time() + self._config.seconds
        within = bounds(config.memory_of_all, config.processes)
        pipes = [os.pipe() for _ in range(3)]
        (read, write), (status, told), (rules, rule) = pipes
        theirs, ours = [read, told, rules], [write, status, rule]
        try:
            os.write(rule, self._bubblewrap.filter)  # a pipe holds it
            os.close(ours.pop())
            options = ["--json-status-fd", str(told), "--seccomp", str(rules), "--file", str(read), path]
            process = await asyncio.create_subprocess_exec(
                *self._bubblewrap.command(within, options, list(command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=theirs,
                env={},
                cwd="/",
                start_new_session=True,
            )
            while theirs:
                os.close(theirs.pop())
            ours.remove(write)
            feeding = asyncio.gather(_feed(process, stdin), asyncio.to_thread(_put, write, file))
            clearing = asyncio.create_task(_clear(process, within))
            looking = asyncio.create_task(_look(process, within))
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
                _kill(process, within)
                await process.wait()
                looking.cancel()
                feeding.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await feeding
                await clearing
            ours.remove(status)
            with os.fdopen(status, "rb") as said:
                began = b"exit-code" in said.read(2**12)
            ended_well = began and process.returncode == 0  # though a process of its own was killed
            out_of_memory = within.exceeded() and not ended_well
        finally:
            for fd in (*theirs, *ours):
                os.close(fd)
            await asyncio.to_thread(within.remove)
        assert process.returncode is not None
        flooded = max(len(output), len(errors)) > bound
        ran = Ran(bytes(output[:bound]), process.returncode, late, flooded, bytes(errors[:bound]), out_of_memory)
        return ran, began


async def _look(process: asyncio.subprocess.Process, within: Bounds) -> None:
    while process.returncode is None:
        await asyncio.to_thread(within.look, process.pid)
        await asyncio.sleep(LOOK)


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
    """End what outlives the sandbox: killed while it begins, it leaves a process that does not yet die with it, waits
    for it for ever, and holds its pipes (for which `process.wait` would wait)."""
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


def _kill(process: asyncio.subprocess.Process, within: Bounds) -> None:
    """Its first process, and all of its bounds."""
    _end(process)
    within.kill()


def _end(process: asyncio.subprocess.Process) -> None:
    """Its first process: all others of its namespace go with it."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
