"""Signals that announce the end of a driver, and its exit code then. Imports nothing that takes long: a notice may come
while the rest is imported."""

import signal
import sys
from types import FrameType

NOTICES = (signal.SIGTERM, signal.SIGUSR1)
"""Schedulers can be asked to send the second one some time ahead."""

EXIT_CODE = 75
"""Of a preempted driver. sysexits.h calls it EX_TEMPFAIL: try again later. 143 would not tell a driver that ended in
order from one that had no chance to."""

WITHHELD = 3
"""Of one whose run may not go on until a person approves it."""

INTERRUPTED = 130
"""Of one that was stopped by SIGINT, as shells have it."""


def mind_notices() -> None:
    """End in order at a notice that comes before there is a run to give back."""
    for signum in NOTICES:
        signal.signal(signum, leave)


def leave(signum: int, frame: FrameType | None) -> None:
    """Handle a notice: nothing has begun."""
    print("preempted before the run was opened; give the command again", file=sys.stderr)
    sys.exit(EXIT_CODE)
