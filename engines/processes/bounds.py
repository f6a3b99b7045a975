"""Bounds on memory and number of all processes of a program together, and whether it was ended at them.

| where | by |
|---|---|
| cgroups of version 2 may be made: root, or a user to whom they are delegated | `memory.max`, `pids.max` |
| those of version 1 may: root | `memory.limit_in_bytes`, `pids.max` |
| none may | looks at its memory, every `LOOK` seconds; `RLIMIT_NPROC` within the sandbox (`bubblewrap.py`) |

Files in the memory of a sandbox, and what the kernel holds for its processes, count in a cgroup. Elsewhere such files
are bounded by their sizes, and of the rest the sandbox refuses what has no bound (`system_calls.py`).
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

LOOK = 0.05
"""Seconds between two looks."""
_CGROUPS = Path("/sys/fs/cgroup")
_BATCH = 2**21
"""Bytes: memory is charged to a cgroup by batches."""
_OWN = 4
"""Processes of the sandbox itself."""


class Bounds(Protocol):
    """Bounds on one program."""

    enter: str
    """What the shell that becomes its first process does before, as root or whoever runs it."""

    def exceeded(self) -> bool:
        """Whether processes of it were ended since its memory was at the bound."""

    def look(self, pid: int) -> None:
        """Hold it to them, where the kernel does not: to be called every `LOOK` seconds. `pid`: its first process."""

    def kill(self) -> None:
        """End whatever is left of it, where that is known."""

    def remove(self) -> None:
        """When all of it has ended."""


def bounds(memory: int, processes: int) -> Bounds:
    """For a program that may hold so many bytes, and so many processes and threads."""
    if folders := _cgroups():
        return Cgroup(folders, memory, processes + _OWN)
    return Watched(memory)


def counted_by_the_kernel() -> bool:
    """Whether cgroups bound programs here."""
    return bool(_cgroups())


class Cgroup:
    """By cgroups: one for both, or one each of version 1."""

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
        """See `Bounds`. A kill of a machine that has no memory left is none at the bound."""
        with suppress(OSError):
            if (events := self._memory / "memory.events").exists():
                found = _counts(events)
                return bool(found["oom_kill"] and found["oom"])
            most = int((self._memory / "memory.max_usage_in_bytes").read_text())
            return most > self._bound - _BATCH and _counts(self._memory / "memory.oom_control")["oom_kill"] > 0
        return False

    def look(self, pid: int) -> None:
        """The kernel does."""

    def kill(self) -> None:
        """See `Bounds`."""
        with suppress(OSError):
            for pid in (self._pids / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        """What was killed takes a moment to go."""
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


class Watched:
    """By looks at it: what its processes hold, with what several share counted once."""

    enter = ":"

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._exceeded = False

    def exceeded(self) -> bool:
        """See `Bounds`."""
        return self._exceeded

    def look(self, pid: int) -> None:
        """See `Bounds`."""
        with suppress(psutil.Error):
            head = psutil.Process(pid)
            processes = [head, *head.children(recursive=True)]
            if _held(processes, "rss") > self._memory and _held(processes, "pss") > self._memory:
                self._exceeded = True
                os.killpg(pid, signal.SIGKILL)

    def kill(self) -> None:
        """Its namespace of processes ends with its first one."""

    def remove(self) -> None:
        """There is nothing."""


def _held(processes: list[psutil.Process], kind: str) -> int:
    """Bytes that processes hold: `rss` is quick, and counts what is shared for each of them."""
    held = 0
    for process in processes:
        with suppress(psutil.Error, OSError):
            held += process.memory_info().rss if kind == "rss" else process.memory_full_info().pss
    return held


def _counts(file: Path) -> dict[str, int]:
    return {name: int(count) for name, count in (line.split() for line in file.read_text().splitlines())}


@cache
def _cgroups() -> dict[str, Path]:
    """Where cgroups of each kind may be made; empty where not all may."""
    kinds = ("memory", "pids")
    candidates = dict.fromkeys(kinds, _delegated()), {kind: _CGROUPS / kind for kind in kinds}
    return next((found for found in candidates if all(_may_make(folder, kind) for kind, folder in found.items())), {})


def _delegated() -> Path:
    """The cgroup of version 2 beside this process's own, in which others may be made."""
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
