"""Quarantine: prompts that are no longer drawn.

| actor | action |
|---|---|
| a person | records that a prompt shall be skipped (`cairn quarantine`) |
| the driver, before it draws the prompts of an iteration | records which prompts are skipped from that iteration on |
| `rollout` | skips these prompts, which are among its commit's inputs |
| a driver that repeats an iteration | finds in the ledger which prompts were skipped |

So nothing depends on when a person's request arrived: before it takes effect, a commit names the iteration. An
iteration for which something was already generated is finished unchanged. Groups that were drawn before, and wait in
the buffer or unfinished, are trained on. A fork inherits what its parent skipped at the fork point.
"""

from collections.abc import Sized
from math import inf

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.decisions import Decision, InForce, Quarantine
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.logs.admissions import newest_claim
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message


def skipped_prompts(ledger: Ledger, iteration: int) -> list[int]:
    """Return the prompts that an iteration skips, as rows of the data set, sorted.

    The owner of a run makes no request for it: nobody else puts requests in force.
    """
    decisions = ledger.decisions
    return list(_in_force(ledger, decisions.all() if ledger.lease is None else decisions.known, iteration))


def wanted(ledger: Ledger, decisions: tuple[Decision, ...]) -> list[int]:
    """Return the prompts that people want to be skipped, sorted."""
    prompts = set(_inherited(ledger))
    for decision in decisions:
        if isinstance(decision.what, Quarantine):
            (prompts.add if decision.what.passed_over else prompts.discard)(decision.what.prompt)
    return sorted(prompts)


def apply_requests(run: RunContext, iteration: int) -> None:
    """Record that the requests so far take effect from this iteration on. Call it before the iteration begins, right
    after the decisions were read for its gate."""
    ledger = run.ledger
    lease = ledger.lease
    assert lease is not None
    decisions = ledger.decisions.known
    if wanted(ledger, decisions) == skipped_prompts(ledger, iteration) or _has_begun(ledger, iteration):
        return

    def from_here(so_far: tuple[Decision, ...]) -> InForce:
        return InForce(iteration=iteration, prompts=tuple(wanted(ledger, so_far)))

    decision = ledger.decisions.record(from_here, by=f"driver of epoch {lease.epoch}", guard=lease.check)
    assert isinstance(decision.what, InForce)
    prompts = ", ".join(map(str, decision.what.prompts)) or "none"
    run.emit(Message(f"From iteration {iteration} on, these prompts are skipped: {prompts}"))
    count = len(run.data) if isinstance(run.data, Sized) else inf
    if absent := [prompt for prompt in decision.what.prompts if prompt >= count]:
        run.emit(Message(f"{run.data.path} has no prompt {absent[0]}: its rows are 0 to {count - 1}", "warning"))


def _in_force(ledger: Ledger, decisions: tuple[Decision, ...], iteration: int) -> tuple[int, ...]:
    own = [d.what.prompts for d in decisions if isinstance(d.what, InForce) and d.what.iteration <= iteration]
    return own[-1] if own else _inherited(ledger)


def _inherited(ledger: Ledger) -> tuple[int, ...]:
    if ledger.parent is None:
        return ()
    return _in_force(ledger.parent, ledger.parent.decisions.all(), ledger.first_iteration - 1)


def _has_begun(ledger: Ledger, iteration: int) -> bool:
    """Whether samples of an iteration exist, committed or not. For a stream a claim of its admission counts too."""
    attempts = layout.attempts(ledger.run, iteration, Step.ROLLOUT)
    if ledger.markers(iteration) or ledger.store.list(attempts):
        return True
    claim = newest_claim(ledger.store, ledger.run)
    return claim is not None and claim.iteration == iteration
