"""Hosts of a test's own: network namespaces, each joined to this one by a cable that can be cut.

    with host() as other:
        other.popen(["python", …])      # a process there, reached at other.there; it reaches this host at other.here
        other.cut()                     # nothing gets through, without an error
        other.mend()

Needs root, and `ip` and `tc` of iproute2.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_numbers = itertools.count()


def why_not() -> str | None:
    """Why there can be no such hosts; None where there can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if missing := [program for program in ("ip", "tc") if shutil.which(program) is None]:
        return f"there is no {' and no '.join(missing)}: install iproute2"
    return None


class Host:
    """A network namespace with one interface."""

    def __init__(self) -> None:
        number = os.getpid() % 10000 * 8 + next(_numbers) % 8
        self._name, self._near, self._far = f"cairn-{number}", f"cairn{number}a", f"cairn{number}b"
        # Link-local addresses: no route of this machine leads there.
        network = f"169.254.{100 + number % 100}"
        self.here, self.there = f"{network}.{1 + number % 50 * 4}", f"{network}.{2 + number % 50 * 4}"
        _ip("netns", "add", self._name)
        _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self._name)
        _ip("address", "add", f"{self.here}/30", "dev", self._near)
        _ip("link", "set", self._near, "up")
        self._inside("address", "add", f"{self.there}/30", "dev", self._far)
        self._inside("link", "set", self._far, "up")
        self._inside("link", "set", "lo", "up")

    def words(self, *command: str) -> list[str]:
        """Words that execute a command there."""
        return ["ip", "netns", "exec", self._name, *command]

    def popen(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Start a process there."""
        return subprocess.Popen(self.words(*command), **options)

    def cut(self) -> None:
        """Drop every packet at both ends, without an answer or an error."""
        for place, end in self._ends():
            _run("tc", *place, "qdisc", "replace", "dev", end, "root", "pfifo", "limit", "0")

    def mend(self) -> None:
        """Drop no more packets."""
        for place, end in self._ends():
            _run("tc", *place, "qdisc", "delete", "dev", end, "root")

    def end(self) -> None:
        """Remove it, and with it what still runs there."""
        for pid in _ip("netns", "pids", self._name).split():
            os.kill(int(pid), 9)
        _ip("link", "delete", self._near)
        _ip("netns", "delete", self._name)

    def _ends(self) -> list[tuple[list[str], str]]:
        return [([], self._near), (["-n", self._name], self._far)]

    def _inside(self, *words: str) -> None:
        _ip("-n", self._name, *words)


@contextmanager
def host() -> Iterator[Host]:
    """A host for the length of the block."""
    made = Host()
    try:
        yield made
    finally:
        made.end()


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout
