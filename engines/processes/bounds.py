"""Limits on memory and number of all processes of a program together, and detection that a limit ended it.

| cgroups | mechanism |
|---|---|
| version 2 may be created: by root, or by a user to whom they are delegated | `memory.max`, `pids.max` |
| version 1 may be created: by root | `memory.limit_in_bytes`, `pids.max` |
| none may be created | a check of its memory at intervals; `RLIMIT_NPROC` in the sandbox (`bubblewrap.py`) |

A cgroup also counts files in the memory of a sandbox, and what the kernel allocates for its processes. Without cgroups
the sizes of such files are bounded, and the sandbox refuses other memory that has no bound (`bubblewrap.py`).
"""

import os
import signal
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Protocol

import psutil

CHECK_INTERVAL = 0.05
"""Seconds between two checks."""
_CGROUPS = Path("/sys/fs/cgroup")
_BATCH = 2**21
"""Bytes by which a cgroup's usage may lag: the kernel charges memory in batches."""
_OWN = 4
"""Number of processes of the sandbox itself."""


class Bounds(Protocol):
    """Limits on one program."""

    enter: str
    """Shell commands that the shell which becomes its first process runs before that, as the caller's user."""

    def exceeded(self) -> bool:
        """Return whether processes of the program were killed because its memory was at the limit."""

    def enforce(self, pid: int) -> None:
        """Enforce the limits where the kernel does not; to be called every `CHECK_INTERVAL` seconds. `pid`: its first
        process."""

    def kill(self) -> None:
        """Kill what is left of the program, where that is known."""

    def remove(self) -> None:
        """Remove the limits after all processes have ended."""


def bounds(memory: int, processes: int) -> Bounds:
    """Return limits for a program: bytes of memory, and number of processes and threads."""
    if folders := _cgroups(os.geteuid()):
        return Cgroup(folders, memory, processes + _OWN)
    return PolledBounds(memory)


def counted_by_the_kernel() -> bool:
    """Return whether cgroups limit programs on this machine."""
    return bool(_cgroups(os.geteuid()))


class Cgroup:
    """Limits by cgroups: one of version 2 for both, or one each of version 1."""

    def __init__(self, parents: Mapping[str, Path], memory: int, processes: int) -> None:
        name = f"cairn-{uuid.uuid4().hex[:12]}"
        self._memory, self._pids = parents["memory"] / name, parents["pids"] / name
        self._folders = sorted({self._memory, self._pids})
        self._bound = memory
        for folder in self._folders:
            folder.mkdir()
        (self._pids / "pids.max").write_text(str(processes))
        limit, swap = ("memory.max", ("memory.swap.max", "0"))
        if not (self._memory / limit).exists():
            limit, swap = ("memory.limit_in_bytes", ("memory.memsw.limit_in_bytes", str(memory)))
        (self._memory / limit).write_text(str(memory))
        if (self._memory / swap[0]).exists():
            (self._memory / swap[0]).write_text(swap[1])
        self.enter = " && ".join(f'echo $$ > "{folder}/cgroup.procs"' for folder in self._folders)

    def exceeded(self) -> bool:
        """Return whether processes were killed at the limit; a kill because the machine was out of memory does not
        count."""
        with suppress(OSError):
            if (events := self._memory / "memory.events").exists():
                counts = _counts(events)
                return bool(counts["oom_kill"] and counts["oom"])
            most = int((self._memory / "memory.max_usage_in_bytes").read_text())
            return most > self._bound - _BATCH and _counts(self._memory / "memory.oom_control")["oom_kill"] > 0
        return False

    def enforce(self, pid: int) -> None:
        """Do nothing: the kernel enforces the limits."""

    def kill(self) -> None:
        """Kill all processes of the cgroup."""
        with suppress(OSError):
            for pid in (self._pids / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        """Remove the cgroups, with retries: killed processes need a moment to disappear."""
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


class PolledBounds:
    """Limits by regular checks of the memory of its processes; shared memory counts once."""

    enter = ":"

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._exceeded = False

    def exceeded(self) -> bool:
        """Return whether the program was killed because its memory was over the limit."""
        return self._exceeded

    def enforce(self, pid: int) -> None:
        """Kill the program if its memory is over the limit."""
        with suppress(psutil.Error):
            head = psutil.Process(pid)
            processes = [head, *head.children(recursive=True)]
            if _memory_of(processes, "rss") > self._memory and _memory_of(processes, "pss") > self._memory:
                self._exceeded = True
                os.killpg(pid, signal.SIGKILL)

    def kill(self) -> None:
        """Do nothing: its PID namespace ends with its first process."""

    def remove(self) -> None:
        """Do nothing: there is nothing to remove."""


def _memory_of(processes: list[psutil.Process], kind: str) -> int:
    """Return the bytes of memory of processes: `rss` is fast, but counts shared memory for each of them."""
    total = 0
    for process in processes:
        with suppress(psutil.Error, OSError):
            total += process.memory_info().rss if kind == "rss" else process.memory_full_info().pss
    return total


def _counts(file: Path) -> dict[str, int]:
    return {name: int(count) for name, count in (line.split() for line in file.read_text().splitlines())}


@cache
def _cgroups(user: int) -> dict[str, Path]:
    """Return the parent folders of new cgroups by controller; empty where `user`, this process's, cannot create one of
    them."""
    kinds = ("memory", "pids")
    candidates = dict.fromkeys(kinds, _delegated()), {kind: _CGROUPS / kind for kind in kinds}
    return next(
        (folders for folders in candidates if all(_may_make(folder, kind) for kind, folder in folders.items())), {}
    )


def _delegated() -> Path:
    """Return the parent of this process's cgroup of version 2, in which others may be created."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                own = _CGROUPS / line.removeprefix("0::/").strip()
                return own if own == _CGROUPS else own.parent
    return _CGROUPS


def _may_make(parent: Path, kind: str) -> bool:
    probe = parent / f"cairn-{uuid.uuid4().hex[:12]}"
    try:
        probe.mkdir()
    except OSError:
        return False
    try:
        limits = {"memory": ("memory.max", "memory.limit_in_bytes"), "pids": ("pids.max",)}[kind]
        return any((probe / limit).exists() for limit in limits) and os.access(parent / "cgroup.procs", os.W_OK)
    finally:
        probe.rmdir()
