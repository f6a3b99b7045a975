"""Which driver a fleet obeys, where several may have come to hold it: that of the newest epoch.

A cluster that was joined outlives its drivers, and so do engines on it. A driver that was suspended, or cut off from
the store, may wake when another one has taken its run over, engines included. So every call carries an epoch:

| an engine is called with an epoch | it |
|---|---|
| the newest that it has heard of, or a newer one | does what it is told |
| an older one | refuses (Superseded), whenever the call was sent; it ends for nobody who comes late either |

What no engine can refuse, being killed when it does not answer and losing its placement group, a driver does only right
after it has found its lease still its own. Between that look and the deed it may still lose the lease; what it destroys
then its successor makes again, groups included.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engines.errors import Superseded


@dataclass(frozen=True)
class Tenure:
    """A driver's right to a fleet that outlives drivers."""

    epoch: int
    """Later drivers have greater ones."""
    check: Callable[[], None]
    """Raises LeaseLost if another driver has the run now, StoreError if nobody can tell."""


class FencedActor:
    """An actor that does what drivers ask of it by `obey`, the newest alone."""

    def __init__(self, epoch: int) -> None:
        """`epoch`: of the driver that makes it."""
        self._newest_epoch = epoch
        self._admitting = threading.Lock()

    def obey(self, epoch: int, method: str, *args: Any) -> Any:
        """Call a method of this actor. Raises Superseded, and what the method raises."""
        self._admit(epoch, method)
        return getattr(self, method)(*args)

    def obey_streaming(self, epoch: int, method: str, *args: Any) -> Iterator[Any]:
        """The same for a method that gives one thing after the other."""
        self._admit(epoch, method)
        yield from getattr(self, method)(*args)

    def end(self) -> None:
        """End this process at once, whatever it is doing."""
        os.kill(os.getpid(), signal.SIGKILL)

    def _admit(self, epoch: int, method: str) -> None:
        with self._admitting:
            if epoch < self._newest_epoch:
                raise Superseded(
                    f"{method}() was refused: this driver's epoch is {epoch}, and the engine belongs to the driver of "
                    f"epoch {self._newest_epoch} by now; nothing committed is lost"
                )
            self._newest_epoch = epoch
