"""Gates: where a run waits before an iteration until a person lets it go on.

| the gate before the iteration | its driver |
|---|---|
| none is due, or it is approved | begins the iteration |
| is due, and is not there | records it, with why; then as if it had been there |
| is open, `approval.wait: true` | says so and waits, its engines up |
| is open, `approval.wait: false` | ends in order, exit code 3 |
| is rejected | ends in order, exit code 3 |

Gates and verdicts are decisions in the ledger (`cairn.storage.ledger.decisions`), and nothing else says how a gate
stands: the driver may be killed while it waits, and the next one comes to the same gate. An approved gate is not asked
again. The newest verdict counts, so a rejected run is approved by saying so, and resumed. A fork has its parent's gates
behind it with the iterations that it shares; those before its own iterations are its own.

What is due depends on the ledger alone, and on nothing that is still being computed: of the evaluations, on those of
the weights that the iteration is sampled from and of older ones.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

from cairn.configs.schema.run import RunConfig
from cairn.flows.events import Stopping
from cairn.flows.reading.gates import asking, due, holding
from cairn.storage.ledger.decisions import Decision, Gate, GateStanding, GateState, gates
from cairn.storage.ledger.ledger import Ledger
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message

POLL_INTERVAL = 2.0
"""Seconds between two looks at the decisions."""


class Withheld(Exception):
    """The run may not go on. The message says why, and what to do."""


class AwaitingApproval(Withheld):
    """Nobody has decided yet."""

    def __init__(self, message: str, gate: GateStanding) -> None:
        super().__init__(message)
        self.gate = gate


class Rejected(Withheld):
    """Somebody has decided that it shall not."""


Showing = Callable[[GateStanding, str], AbstractContextManager[None]]
"""Shows elsewhere, for as long as the block lasts, that the run waits at a gate, with a sentence."""


def admit(
    run: RunContext,
    index: int,
    showing: Showing = lambda gate, sentence: nullcontext(),
) -> None:
    """Return when iteration `index` may begin. Raises AwaitingApproval and Rejected, Stopping where the driver is to
    end meanwhile, and LeaseLost."""
    ledger = run.ledger
    if (held := holding(ledger, index)) is None:
        cause = due(ledger, run.config, index)
        if cause is None:
            return
        _open(run, index, *cause)
        held = holding(ledger, index)
    if held is None:
        return
    _require(held, ledger.run, wait=run.config.approval.wait)
    sentence = asking(held, ledger.run)
    run.emit(Message(f"{sentence}; the engines stay up meanwhile", "warning"))
    with showing(held, sentence):
        while held is not None:
            if run.stopping.wait(POLL_INTERVAL):
                raise Stopping(f"the driver ends: iteration {index} waits for approval and does not begin")
            ledger.require_held()
            held = holding(ledger, index)
            if held is not None:
                _require(held, ledger.run, wait=True)
    newest = max((gate for gate in ledger.decisions.gates().values() if gate.verdict), key=_when, default=None)
    run.emit(Message(f"Iteration {index} may begin, approved{_by(newest.verdict if newest else None)}"))


def require_not_withheld(ledger: Ledger, config: RunConfig, index: int | None) -> None:
    """Raise Withheld if iteration `index` may not begin and no driver is to wait for it. Before engines start."""
    held = None if index is None else holding(ledger, index)
    if held is not None:
        _require(held, ledger.run, wait=config.approval.wait)


def _open(run: RunContext, index: int, cause: str, sentence: str) -> None:
    lease = run.ledger.lease
    assert lease is not None

    def gate(so_far: tuple[Decision, ...]) -> Gate:
        if index in gates(so_far):
            raise _AlreadyThere
        return Gate.model_validate({"iteration": index, "cause": cause})

    with suppress(_AlreadyThere):  # somebody decided meanwhile
        run.ledger.decisions.record(gate, by=f"driver of epoch {lease.epoch}", why=sentence, guard=lease.check)


class _AlreadyThere(Exception):
    """There is a gate, or a verdict."""


def _require(held: GateStanding, run: str, *, wait: bool) -> None:
    if held.state is GateState.REJECTED:
        place = f"{run} {held.iteration}"
        fork = f"fork it (cairn fork {run}@{held.iteration - 1} NEW), or " if held.iteration else ""
        raise Rejected(
            f"Run {run} was rejected before iteration {held.iteration}{_by(held.verdict)}; nothing committed is lost: "
            f"{fork}change the verdict (cairn approve {place}) and cairn resume {run}"
        )
    if not wait:
        raise AwaitingApproval(f"{asking(held, run)}. Then: cairn resume {run}", held)


def _when(gate: GateStanding) -> int:
    return gate.verdict.number if gate.verdict else 0


def _by(verdict: Decision | None) -> str:
    if verdict is None:
        return ""
    return f" by {verdict.by}" + (f" ({verdict.why})" if verdict.why else "")
