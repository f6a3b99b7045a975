"""Fencing: an engine obeys only the driver of its run with the newest epoch, where several may have come to hold it.

A joined cluster outlives its drivers, and so do the engines on it. A driver that was suspended, or cut off from the
store, may wake up later. By then another driver may have taken over its run with the engines. Or the run was deleted,
and another run has its name and the names of its engines. So every call carries a claim: the run and the driver's
epoch.

| the call comes from | the engine |
|---|---|
| its run, with the newest epoch that it knows, or a newer one | obeys |
| its run, with an older epoch | refuses (Superseded), whenever the call was sent, also where the call is `end` |
| another run of the same name | refuses likewise; that run's driver makes engines of its own |

An engine cannot refuse to be killed when it does not respond, nor the removal of its placement group. A driver does
these only right after it has checked that it still holds its lease. It may still lose the lease between the check and
the action. Its successor then makes again what it destroyed, groups included.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from cairn.engines.types.errors import Superseded

P = ParamSpec("P")
R = TypeVar("R")

Method = Callable[Concatenate[Any, P], R]
"""A method of an actor or of its engine, as the attribute of a class or protocol: `RolloutEngine.abort`. Calls name it
so that its arguments and its result are checked."""


@dataclass(frozen=True)
class Claim:
    """Identity of the driver that makes a call."""

    run: str
    """Unique id of the run, different also from those of runs that have or had its name."""
    epoch: int
    """Epoch of the driver; later drivers of the run have greater ones."""

    def __str__(self) -> str:
        return f"epoch {self.epoch} of run {self.run[:12]}"


NO_CLAIM = Claim("", 0)
"""Claim for engines that no other driver will ever have."""


@dataclass(frozen=True)
class Tenure:
    """A driver's right to a fleet that outlives drivers."""

    claim: Claim
    check: Callable[[], None]
    """Function that raises LeaseLost if another driver has the run now, and StoreError if this cannot be determined."""


@dataclass(frozen=True)
class Callee:
    """A Ray actor and the claim of its caller. Other processes may receive it, and then call the actor for the same
    driver."""

    handle: Any
    claim: Claim
    options: Mapping[str, Any] = field(default_factory=dict)
    """Ray's options of the calls, such as `concurrency_group`."""

    def call(self, method: Method[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call a method; returns what Ray's `.remote()` returns. The result may be Superseded."""
        streams = self.options.get("num_returns") == "streaming"
        obey = self.handle.obey_streaming if streams else self.handle.obey
        name = method.__name__
        return obey.options(name=name, **self.options).remote(self.claim, name, *args, **kwargs)


class FencedActor:
    """An actor that drivers call through `obey`, which accepts only the newest of them."""

    def __init__(self, claim: Claim) -> None:
        """`claim` is that of the driver that makes the actor."""
        self._newest = claim
        self._accepting = threading.Lock()

    def obey(self, claim: Claim, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of this actor. Raises Superseded, and what the method raises."""
        self._accept(claim, method)
        return self._find(method)(*args, **kwargs)

    def obey_streaming(self, claim: Claim, method: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Call a method that yields its results one by one. Raises as `obey` does."""
        self._accept(claim, method)
        with closing(self._find(method)(*args, **kwargs)) as stream:
            yield from (part for part in stream)  # a generator: Ray sends into it, which not every stream takes

    def end(self) -> None:
        """End this process at once, whatever it is doing."""
        os.kill(os.getpid(), signal.SIGKILL)

    def _find(self, method: str) -> Callable[..., Any]:
        return getattr(self, method)

    def _accept(self, claim: Claim, method: str) -> None:
        with self._accepting:
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
