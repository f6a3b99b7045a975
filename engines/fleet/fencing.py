"""Which driver a fleet obeys, where several may have come to hold it: that of the newest epoch of the run it is of.

A cluster that was joined outlives its drivers, and so do engines on it. A driver that was suspended, or cut off from
the store, may wake when another one has taken its run over, engines included, or when its run was deleted and another
one has its name and its engines' names. So every call carries a claim, the run and the driver's epoch:

| an engine is called for | it |
|---|---|
| its run, with the newest epoch that it has heard of, or a newer one | does what it is told |
| its run, with an older epoch | refuses (Superseded), whenever the call was sent; it ends for nobody who comes late |
| another run of the name | refuses likewise: its driver makes engines of its own |

What no engine can refuse, being killed when it does not answer and losing its placement group, a driver does only right
after it has found its lease still its own. Between that look and the deed it may still lose the lease; what it destroys
then its successor makes again, groups included.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from cairn.engines.types.errors import Superseded


@dataclass(frozen=True)
class Claim:
    """For whom an engine is called."""

    run: str
    """Unlike that of every other run, also of one that has or had its name."""
    epoch: int
    """Of the driver; later drivers of the run have greater ones."""

    def __str__(self) -> str:
        return f"epoch {self.epoch} of run {self.run[:12]}"


NO_CLAIM = Claim("", 0)
"""For engines that nobody else will come to have."""


@dataclass(frozen=True)
class Tenure:
    """A driver's right to a fleet that outlives drivers."""

    claim: Claim
    check: Callable[[], None]
    """Raises LeaseLost if another driver has the run now, StoreError if nobody can tell."""


@dataclass(frozen=True)
class Callee:
    """A Ray actor, and for whom it is called; may be given to other processes, which call it for the same driver."""

    handle: Any
    claim: Claim

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method; returns what Ray's `.remote()` returns. The result may be Superseded."""
        streams = options.get("num_returns") == "streaming"
        obey = self.handle.obey_streaming if streams else self.handle.obey
        return obey.options(name=method, **options).remote(self.claim, method, *args)


class FencedActor:
    """An actor that does what drivers ask of it by `obey`, the newest alone."""

    def __init__(self, claim: Claim) -> None:
        """`claim`: of the driver that makes it."""
        self._newest = claim
        self._admitting = threading.Lock()

    def obey(self, claim: Claim, method: str, *args: Any) -> Any:
        """Call a method of this actor. Raises Superseded, and what the method raises."""
        self._admit(claim, method)
        return self._find(method)(*args)

    def obey_streaming(self, claim: Claim, method: str, *args: Any) -> Iterator[Any]:
        """The same for a method that gives one thing after the other."""
        self._admit(claim, method)
        with closing(self._find(method)(*args)) as stream:
            yield from (part for part in stream)  # a generator: Ray sends into it, which not every stream takes

    def end(self) -> None:
        """End this process at once, whatever it is doing."""
        os.kill(os.getpid(), signal.SIGKILL)

    def _find(self, method: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self, method)
        return found

    def _admit(self, claim: Claim, method: str) -> None:
        with self._admitting:
            if claim.run != self._newest.run:
                raise Superseded(
                    f"{method}() was refused: this driver has {claim}, and the engine belongs to {self._newest}, "
                    "another run of that name; nothing committed is lost"
                )
            if claim.epoch < self._newest.epoch:
                raise Superseded(
                    f"{method}() was refused: this driver's epoch is {claim.epoch}, and the engine belongs to the "
                    f"driver of epoch {self._newest.epoch} by now; nothing committed is lost"
                )
            self._newest = claim
