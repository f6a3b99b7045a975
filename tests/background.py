"""A command as a script starts it in the background: a real shell, which has it ignore SIGINT."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SCRIPT = """
"$@" &
echo $!
wait $!
"""


class Background:
    """The command, and the script that waits for it and ends with its code."""

    def __init__(self, script: "subprocess.Popen[str]") -> None:
        assert script.stdout is not None
        assert script.stderr is not None
        self._script = script
        self.stdout, self.stderr = script.stdout, script.stderr
        self.pid = int(self.stdout.readline())
        """The command's."""

    def send_signal(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What else both say, until both have ended."""
        return self._script.communicate(timeout=timeout)

    def poll(self) -> int | None:
        return self._script.poll()

    @property
    def returncode(self) -> int | None:
        return self._script.returncode


@contextmanager
def in_background(*command: str | Path, cwd: Path | None = None, **environment: str) -> Iterator[Background]:
    """The command, for the length of the block."""
    pipe = subprocess.PIPE
    arguments = ["sh", "-c", SCRIPT, "script", *command]
    environ = os.environ | environment
    with subprocess.Popen(arguments, cwd=cwd, env=environ, stdout=pipe, stderr=pipe, text=True) as script:
        started = Background(script)
        try:
            yield started
        finally:
            if script.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(started.pid, signal.SIGKILL)
                script.kill()
