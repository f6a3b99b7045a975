"""Runs a command in this process's group, and ends the whole group when the process that asked for it is gone.

    python -I guard.py PARENT_PID COMMAND…

A server would outlive an actor that is killed: nobody tells it. The guard looks after its parent twice a second. If the
guard itself is killed, the kernel kills the command, and SGLang's other processes watch the command.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1


def _die_with_the_guard() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(parent: int, command: list[str]) -> int:
    with subprocess.Popen(command, preexec_fn=_die_with_the_guard) as server:
        while server.poll() is None:
            if os.getppid() != parent:
                os.killpg(0, signal.SIGKILL)
            time.sleep(0.5)
        return server.returncode


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
