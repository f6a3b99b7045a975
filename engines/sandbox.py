"""A program that is not trusted, in a sandbox of bubblewrap: one run of it, with nothing of this machine.

| what a program may not | is held by |
|---|---|
| reach a network | `--unshare-all`: a network of its own, with no way out |
| see the environment or the processes of this machine | `--clearenv`; a namespace of processes of its own |
| see its files | there are `/usr` and the interpreter alone, read-only |
| write anywhere but in its scratch folder | which is memory, of bounded size, and goes with it |
| gain rights | `--cap-drop ALL`, nobody's user, `--disable-userns`, no new privileges |
| compute, or wait, without end | `RLIMIT_CPU`, and a deadline on the wall clock, which ends all of its processes |
| take the memory | `RLIMIT_AS` for each process; where a cgroup may be made, a limit for all of them |
| start processes without end | the cgroup's limit; without one the deadline |
| write without end | `RLIMIT_FSIZE`, the size of the scratch folder, a bound on what is read of its output |
| outlive this process, or end it | `--die-with-parent`; it sees no process but its own |

What it does not hold: a hole in the kernel. Cgroups are those of version 1, which root may make; without them memory
and number of all processes together are bounded by the deadline alone. A driver that is killed leaves empty ones.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cairn.configs.plugins import BadPlugin

_SCRATCH = "/scratch"
_PROBE = 20.0
"""Seconds that a look at the sandbox may take."""
_CGROUPS = Path("/sys/fs/cgroup")


class SandboxFailed(Exception):
    """The sandbox did not start, though sandboxes do here: the machine has no room."""


@dataclass(frozen=True)
class Confined:
    """What a program may have, and who runs it."""

    user: str
    """For people: `the grader 'code'`."""
    bwrap_option: str
    """Where `bwrap` is configured."""
    bwrap: str
    """Name or path of bubblewrap's program."""
    python: str | None
    """Path of the interpreter; None: this process's own."""
    seconds: float
    """On the wall clock."""
    cpu_time: int
    """Seconds."""
    memory: int
    """Bytes of address space of each process, and of memory of all of them where a cgroup may be made."""
    processes: int
    """And threads, where a cgroup may be made."""
    file_size: int
    """Bytes of one file, of the scratch folder, and of what is read of each of its outputs."""


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


class Sandbox:
    """Runs programs, each in a sandbox of its own. Raises BadPlugin where this machine makes none."""

    def __init__(self, config: Confined) -> None:
        self._config = config
        self._command = _command(config)
        self.bounds_all = _may_make_cgroups()
        """Whether processes and memory of all processes of a program are bounded, too."""

    async def run(self, program: bytes, stdin: bytes) -> Ran:
        """Run a Python program. Raises as `execute` does."""
        path = f"{_SCRATCH}/program.py"
        return await self.execute([_python(self._config), "-I", "-S", path], stdin, program, path)

    async def execute(
        self, command: Sequence[str], stdin: bytes, file: bytes = b"", path: str = "/scratch/.file"
    ) -> Ran:
        """Run a command; there is a file at `path`. Raises SandboxFailed, and OSError where the machine has no room."""
        config, end = self._config, asyncio.get_running_loop().time() + self._config.seconds
        read, write = os.pipe()
        status, told = os.pipe()
        group = _Cgroup.make(config) if self.bounds_all else None
        try:
            process = await asyncio.create_subprocess_exec(
                *(group.enter if group else ()),
                *self._command,
                "--json-status-fd",
                str(told),
                "--file",
                str(read),
                path,
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[read, told],
                env={},
                cwd="/",
                start_new_session=True,
            )
            os.close(read)
            os.close(told)
            read = told = -1
            feeding = asyncio.gather(_feed(process, stdin), asyncio.to_thread(_put, write, file))
            write = -1
            clearing = asyncio.create_task(_clear(process, group))
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
                _kill(process, group)
                await process.wait()
                feeding.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await feeding
                await clearing
        finally:
            for fd in (read, write, told):
                if fd >= 0:
                    os.close(fd)
            if group is not None:
                await asyncio.to_thread(group.remove)
            with os.fdopen(status, "rb") as said:
                began = b"exit-code" in said.read(2**12)
        flooded = max(len(output), len(errors)) > bound
        if not (began or late or flooded):
            why = errors.decode(errors="replace").strip()[-300:]
            raise SandboxFailed(f"the sandbox of {config.user} did not start (exit code {process.returncode}): {why}")
        assert process.returncode is not None
        return Ran(bytes(output[:bound]), process.returncode, late, flooded, bytes(errors[:bound]))


def _command(config: Confined) -> list[str]:
    bwrap = shutil.which(config.bwrap)
    if bwrap is None:
        raise BadPlugin(
            f"{config.user} runs programs in a sandbox of bubblewrap, and there is no {config.bwrap!r} on PATH: "
            f"install bubblewrap, or set {config.bwrap_option} to its path"
        )
    limits = [
        shutil.which("prlimit") or "prlimit",
        f"--as={config.memory}",
        f"--cpu={config.cpu_time}",
        f"--fsize={config.file_size}",
        "--core=0",
        "--",
    ]
    sandbox = [
        *(bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--clearenv"),
        *("--ro-bind", "/usr", "/usr"),
        *(word for name in ("bin", "lib", "lib64") for word in ("--symlink", f"usr/{name}", f"/{name}")),
        *(word for folder in _interpreter_folders(config) for word in ("--ro-bind", folder, folder)),
        *("--proc", "/proc", "--dev", "/dev", "--size", str(config.file_size), "--tmpfs", _SCRATCH),
        *("--remount-ro", "/", "--chdir", _SCRATCH),
    ]
    _probe([*limits, *sandbox], config)
    return [*limits, *sandbox]


def _python(config: Confined) -> str:
    return config.python or os.path.realpath(sys.executable)


def _interpreter_folders(config: Confined) -> list[str]:
    """What of the interpreter lies elsewhere than below /usr."""
    if config.python is not None:
        found = {str(Path(config.python).resolve().parent.parent)}
    else:
        found = {sys.base_prefix, sysconfig.get_paths(vars={"base": sys.base_prefix})["stdlib"]}
        found.add(str(Path(_python(config)).parent.parent))
    folders = {os.path.realpath(folder) for folder in found}
    return sorted(folder for folder in folders if folder != "/" and not Path(folder).is_relative_to("/usr"))


def _probe(command: list[str], config: Confined) -> None:
    """See that a sandbox works here. Raises BadPlugin."""
    try:
        looked = subprocess.run(
            [*command, _python(config), "-I", "-S", "-c", "print('works')"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={},
            cwd="/",
            timeout=_PROBE,
        )
        why = "" if looked.stdout == b"works\n" else looked.stderr.decode(errors="replace").strip()[-300:] or "no word"
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why:
        raise BadPlugin(
            f"{config.user} runs programs in a sandbox alone, and this machine makes none ({why}): allow user "
            "namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone), or use another machine"
        )


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
            _kill(process, None)


async def _clear(process: asyncio.subprocess.Process, group: "_Cgroup | None") -> None:
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
    if group is not None:
        group.kill()


def _kill(process: asyncio.subprocess.Process, group: "_Cgroup | None") -> None:
    """Its first process: all others of its namespace go with it."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    if group is not None:
        group.kill()


def _may_make_cgroups() -> bool:
    return all(_is_own(_CGROUPS / kind) for kind in ("pids", "memory"))


def _is_own(folder: Path) -> bool:
    probe = folder / f"cairn-{uuid.uuid4().hex[:12]}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


class _Cgroup:
    """Limits on all processes of a program together, by cgroups of version 1."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    @classmethod
    def make(cls, config: Confined) -> "_Cgroup":
        name = f"cairn-{uuid.uuid4().hex[:12]}"
        pids, memory = folders = [_CGROUPS / "pids" / name, _CGROUPS / "memory" / name]
        for folder in folders:
            folder.mkdir()
        # Of the sandbox itself there are a few.
        (pids / "pids.max").write_text(str(config.processes + 4))
        (memory / "memory.limit_in_bytes").write_text(str(config.memory + 2 * config.file_size + 2**25))
        return cls(folders)

    @property
    def enter(self) -> tuple[str, ...]:
        """What a command is begun with, to be in it."""
        entering = " && ".join(f'echo $$ > "{folder}/cgroup.procs"' for folder in self._folders)
        return ("/bin/sh", "-c", f'{entering} && exec "$@"', "sh")

    def kill(self) -> None:
        """Whatever is still in it."""
        with suppress(OSError):
            for pid in (self._folders[0] / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        """When it is empty: what was killed takes a moment to go."""
        for folder in self._folders:
            for _ in range(200):
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    self.kill()
                    time.sleep(0.01)
