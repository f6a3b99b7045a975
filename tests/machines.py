"""Machines of a test's own: each with processes, a boot, a name and shared memory of its own, and the network of a host
of `tests.network` if it is given one.

    with machine("one", folder) as one:
        subprocess.Popen(one.words("python", …))   # a process there
        one.sleep()                                # none of its processes runs
        one.wake()
        one.end()                                  # it loses its power

Needs root, and unshare and nsenter of util-linux.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.network import Host
from tests.waiting import wait_for

TEMPORARY = "/var/tmp"
"""Folder of its own for temporary files, with a path short enough for Ray's sockets."""


def why_not() -> str | None:
    """Why there can be no such machines; None where there can."""
    if os.geteuid() != 0:
        return "process and mount namespaces need root"
    if missing := [program for program in ("unshare", "nsenter") if shutil.which(program) is None]:
        return f"there is no {' and no '.join(missing)}: install util-linux"
    return None


def alone(name: str, folder: Path) -> list[str]:
    """Words before a command that make it process 1 of a machine. `folder`: for a file of the machine."""
    boot = folder / f"boot-of-{name}"
    boot.write_text(f"{name}\n")
    script = [
        f"mount --bind {boot} /proc/sys/kernel/random/boot_id",
        "mount -t tmpfs none /dev/shm",
        f"mount -t tmpfs none {TEMPORARY}",
        f"echo {name} > /proc/sys/kernel/hostname",
        'exec "$@"',
    ]
    namespaces = ["--fork", "--kill-child", "--pid", "--mount-proc", "--uts"]
    return ["unshare", *namespaces, "sh", "-c", " && ".join(script), "sh"]


class Machine:
    """See above; made by `machine`."""

    def __init__(self, name: str, folder: Path, host: Host | None = None) -> None:
        self.name = name
        # Process 1 waits for whatever loses its parent, as on any machine, and ends with this process.
        power = [*alone(name, folder), "sh", "-c", "echo on; cat > /dev/null; exit"]
        self._power = subprocess.Popen(
            power if host is None else host.words(*power), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._power.stdout is not None
        assert self._power.stdout.readline() == b"on\n"
        (first,) = psutil.Process(self._power.pid).children()
        self._first = first.pid
        self._namespace = os.readlink(f"/proc/{self._first}/ns/pid")

    def words(self, *command: str) -> list[str]:
        """Words that execute a command there, in the working folder of whoever starts them."""
        enter = ["nsenter", f"--target={self._first}", "--pid", "--mount", "--uts", "--net", "--wd=."]
        return [*enter, "env", f"TMPDIR={TEMPORARY}", *command]

    def processes(self) -> list[psutil.Process]:
        """Return all processes there."""
        found = []
        for process in psutil.process_iter():
            with suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == self._namespace:
                    found.append(process)
        return found

    def sleep(self) -> None:
        """Stop every process."""
        stopped: set[psutil.Process] = set()
        while awake := {*self.processes()} - stopped:  # what one of them has started meanwhile
            for process in awake:
                process.suspend()
            stopped |= awake

    def wake(self) -> None:
        """Resume them, and nsenter, which stops with what it has started."""
        for process in self.processes():
            parent = process.parent()
            process.resume()
            if parent is not None and parent.name() == "nsenter":
                parent.resume()

    def end(self) -> None:
        """Kill everything at once."""
        self._power.kill()
        self._power.communicate()
        wait_for(lambda: not self.processes(), 60)


@contextmanager
def machine(name: str, folder: Path, host: Host | None = None) -> Iterator[Machine]:
    """A machine for the length of the block."""
    made = Machine(name, folder, host)
    try:
        yield made
    finally:
        made.end()
