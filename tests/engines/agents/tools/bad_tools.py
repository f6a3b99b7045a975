"""Tools that misbehave, in a module, so that they run in tool processes."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cairn


@cairn.tool(kind="pure")
def add(a: int, b: int) -> int:
    return a + b


@cairn.tool(kind="pure")
def pid() -> int:
    return os.getpid()


@cairn.tool(kind="effects")
def note(path: str, idempotency_key: str) -> str:
    with Path(path).open("a") as file:
        file.write(f"{idempotency_key}\n")
    return idempotency_key


@cairn.tool(kind="pure")
def divide(a: float, b: float) -> float:
    return a / b


@cairn.tool(kind="pure")
def leave() -> None:
    raise SystemExit(3)


@cairn.tool(kind="pure")
def exit_at_once() -> None:
    os._exit(7)


@cairn.tool(kind="pure")
def segfault() -> None:
    ctypes.string_at(0)


@cairn.tool(kind="pure", timeout=0.3)
def compute() -> None:
    while True:
        pass


@cairn.tool(kind="pure", timeout=1.5)
def start_others(path: str) -> None:
    """One in a group of its own, and one whose parent is gone."""
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    first = subprocess.Popen(sleeper, start_new_session=True)
    if not os.fork():
        second = subprocess.Popen(sleeper, start_new_session=True)
        Path(path).write_text(f"{first.pid} {second.pid}")
        os._exit(0)
    time.sleep(600)


@cairn.tool(kind="pure")
def fork_and_return() -> str:
    return "child" if os.fork() == 0 else "parent"


@cairn.tool(kind="pure")
def leave_a_process(path: str) -> str:
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    Path(path).write_text(str(subprocess.Popen(sleeper).pid))
    return "done"


@cairn.tool(kind="pure", memory=64 * 2**20)
def hoard() -> int:
    return len(bytearray(10**9))


@cairn.tool(kind="pure")
def gigabyte() -> str:
    return "x" * 10**9


@cairn.tool(kind="pure")
def gigabytes() -> list[str]:
    return ["x" * 10**6] * 10**6


@cairn.tool(kind="pure")
def raw() -> bytes:
    return b"\0" * 10**9


@cairn.tool(kind="pure")
def other() -> Any:
    return {1, 2}


@cairn.tool(kind="pure")
def silent() -> None:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


@cairn.tool(kind="pure")
def killed(path: str, times: int) -> int:
    """Ended from outside so many times."""
    with Path(path).open("a") as file:
        file.write("x")
    tries = len(Path(path).read_text())
    if tries <= times:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    return tries


@cairn.tool(kind="effects")
def killed_with_effects(path: str) -> None:
    with Path(path).open("a") as file:
        file.write("x")
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@cairn.tool(kind="pure", timeout=600)
def hang(path: str, seconds: float = 600) -> None:
    with Path(path).open("a") as file:
        file.write("x")
    time.sleep(seconds)


@cairn.tool(kind="pure", timeout=600)
def compute_on(path: str) -> None:
    with Path(path).open("a") as file:
        file.write("x")
    while True:
        pass


@cairn.tool(kind="pure")
def nap(seconds: float) -> None:
    time.sleep(seconds)


@cairn.tool(kind="pure")
def busy(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def connects(port: int) -> bool:
    """Whether a port of this machine is reached."""
    import socket

    try:
        socket.create_connection(("127.0.0.1", port), 2).close()
    except OSError:
        return False
    return True
