"""Signals that announce the end of a driver, and its exit codes.

Imports nothing slow: a signal may arrive while the rest is being imported.
"""

import signal
import sys
from types import FrameType

NOTICES = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that request the end of the driver. Schedulers can be configured to send SIGUSR1 some time ahead."""

EXIT_CODE = 75
"""Exit code of a preempted driver. sysexits.h calls it EX_TEMPFAIL: try again later. 143 would not distinguish a driver
that ended in order from one that was killed."""

AWAITING_APPROVAL = 3
"""Exit code of a driver whose run needs a person's approval."""

INTERRUPTED = 130
"""Exit code of a driver stopped by SIGINT, as in shells."""


def install_early_handlers() -> None:
    """Handle notices that arrive before the run is opened: end in order."""
    for signum in NOTICES:
        signal.signal(signum, exit_preempted)


def exit_preempted(signum: int, frame: FrameType | None) -> None:
    """Handle a notice before anything has begun: exit with `EXIT_CODE`."""
    print("preempted before the run was opened; run the command again", file=sys.stderr)
    sys.exit(EXIT_CODE)
