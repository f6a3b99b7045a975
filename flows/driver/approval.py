"""Gates: points before an iteration where a run waits for a person's approval.

| the gate before the iteration | its driver |
|---|---|
| none is due, or it is approved | begins the iteration |
| is due, and not recorded | records it with the reason; then acts on it as on a recorded one |
| is open, `approval.wait: true` | reports it and waits with its engines up |
| is open, `approval.wait: false` | ends in order, exit code 3 |
| is rejected | ends in order, exit code 3 |

Gates and verdicts are decisions in the ledger (`cairn.storage.ledger.decisions`), and the ledger alone holds a gate's
state: a driver may be killed while it waits, and the next one finds the same gate. An approved gate does not open
again. The newest verdict counts: to continue a rejected run, approve it and resume it. A fork inherits its parent's
gates before the iterations that it shares; the gates before its own iterations are its own.

Which gates are due depends only on the ledger, and not on running computations. Of the evaluations, only those of the
weights that the iteration samples from, and of older weights, count.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

from cairn.configs.schema.run import RunConfig
from cairn.flows.events import Stopping
from cairn.flows.reading.gates import approval_request, blocking_gate, due
from cairn.flows.reading.views import current_iteration
from cairn.storage.ledger.decisions import Decision, Gate, GateState, GateStatus, gates
from cairn.storage.ledger.ledger import Ledger
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message

POLL_INTERVAL = 2.0
"""Seconds between two reads of the decisions."""


class Withheld(Exception):
    """The run may not continue. The message contains the reason, and what to do."""


class AwaitingApproval(Withheld):
    """A person has not decided yet."""

    def __init__(self, message: str, gate: GateStatus) -> None:
        super().__init__(message)
        self.gate = gate


class Rejected(Withheld):
    """A person has rejected the iteration."""


def wait_for_approval(
    run: RunContext,
    index: int,
    display: Callable[[GateStatus, str], AbstractContextManager[None]] = lambda gate, sentence: nullcontext(),
) -> None:
    """Return when iteration `index` may begin. `display` shows elsewhere, while its block runs, that the run waits at a
    gate, with a sentence.

    Raises AwaitingApproval and Rejected, Stopping where the driver is requested to end meanwhile, and LeaseLost.
    """
    ledger = run.ledger
    if (gate := blocking_gate(ledger, index)) is None:
        cause = due(ledger, run.config, index)
        if cause is None:
            return
        _record_gate(run, index, *cause)
        gate = blocking_gate(ledger, index)
    if gate is None:
        return
    _require(gate, ledger.run, wait=run.config.approval.wait)
    sentence = approval_request(gate, ledger.run)
    run.emit(Message(f"{sentence}; the engines stay up meanwhile", "warning"))
    with display(gate, sentence):
        while gate is not None:
            if run.stopping.wait(POLL_INTERVAL):
                raise Stopping(f"the driver ends: iteration {index} waits for approval and does not begin")
            ledger.require_lease()
            gate = blocking_gate(ledger, index)
            if gate is not None:
                _require(gate, ledger.run, wait=True)
    verdicts = [gate.verdict for gate in ledger.decisions.gates().values() if gate.verdict]
    newest = max(verdicts, key=lambda verdict: verdict.number, default=None)
    run.emit(Message(f"Iteration {index} may begin, approved{_by(newest)}"))


def require_not_withheld(ledger: Ledger, config: RunConfig) -> None:
    """Raise Withheld if the current iteration may not begin and the configuration lets no driver wait. Called before
    engines start."""
    if blocking_gate(ledger, config.rollout.num_rollout) is None:
        return
    index = current_iteration(ledger, config)
    gate = None if index is None else blocking_gate(ledger, index)
    if gate is not None:
        _require(gate, ledger.run, wait=config.approval.wait)


def _record_gate(run: RunContext, index: int, cause: str, sentence: str) -> None:
    lease = run.ledger.lease
    assert lease is not None

    def gate(so_far: tuple[Decision, ...]) -> Gate:
        if index in gates(so_far):
            raise _AlreadyRecorded
        return Gate.model_validate({"iteration": index, "cause": cause})

    with suppress(_AlreadyRecorded):  # somebody decided meanwhile
        run.ledger.decisions.record(gate, by=f"driver of epoch {lease.epoch}", why=sentence, guard=lease.check)


class _AlreadyRecorded(Exception):
    """The gate is already recorded."""


def _require(gate: GateStatus, run: str, *, wait: bool) -> None:
    if gate.state is GateState.REJECTED:
        place = f"{run}@{gate.iteration}"
        fork = f"fork it (cairn fork {run}@{gate.iteration - 1} NEW), or " if gate.iteration else ""
        raise Rejected(
            f"Run {run} was rejected before iteration {gate.iteration}{_by(gate.verdict)}; nothing committed is lost: "
            f"{fork}change the verdict (cairn approve {place}) and cairn resume {run}"
        )
    if not wait:
        raise AwaitingApproval(f"{approval_request(gate, run)}. Then: cairn resume {run}", gate)


def _by(verdict: Decision | None) -> str:
    if verdict is None:
        return ""
    return f" by {verdict.by}" + (f" ({verdict.why})" if verdict.why else "")
