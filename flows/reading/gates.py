"""Gates of a run: which are due, their state, and decisions about them.

`cairn.flows.driver.approval` implements the driver's side.
"""

from cairn.configs.loader import from_manifest
from cairn.configs.schema.run import RunConfig
from cairn.flows.reading.samples import evaluations, scored
from cairn.storage.ledger.decisions import Decision, Gate, GateState, GateStatus, Verdict, gates
from cairn.storage.ledger.ledger import Ledger


def blocking_gate(ledger: Ledger, index: int) -> GateStatus | None:
    """Return the first gate before iteration `index`, or before an earlier one, that is not approved; None without
    one."""
    before = sorted(ledger.decisions.gates().items())
    return next((gate for i, gate in before if i <= index and gate.state is not GateState.APPROVED), None)


def approval_request(gate: GateStatus, run: str) -> str:
    """Return one sentence: why a run waits, and how to decide."""
    why = f" ({gate.gate.why})" if gate.gate is not None and gate.gate.why else ""
    place = f"{run}@{gate.iteration}"
    return f"Run {run} waits before iteration {gate.iteration}{why}: cairn approve {place}, or cairn reject {place}"


def due(ledger: Ledger, config: RunConfig, index: int) -> tuple[str, str] | None:
    """Return the cause of a gate that is due before iteration `index` and has no record yet, and a sentence; None if
    none is due. `blocking_gate` has read the decisions."""
    approval = config.approval
    verdict = gates(ledger.decisions.known).get(index)
    if verdict is not None:
        return None
    if index in approval.before:
        return "before", f"approval.before names iteration {index}"
    if approval.every is not None and index and index % approval.every == 0:
        return "every", f"approval.every is {approval.every}"
    fallen = _fall(ledger, config, index)
    return None if fallen is None else ("eval_drop", fallen)


def decide(
    ledger: Ledger, config: RunConfig, index: int | None, *, approved: bool, why: str | None, by: str | None
) -> Decision:
    """Approve or reject the gate before an iteration, by default the one at which the run waits. Raises ValueError with
    a sentence where there is nothing to decide."""

    def verdict(so_far: tuple[Decision, ...]) -> Verdict:
        existing = gates(so_far)
        chosen = _undecided(ledger, existing) if index is None else index
        if chosen >= config.rollout.num_rollout:
            raise ValueError(f"run {ledger.run!r} has iterations 0 to {config.rollout.num_rollout - 1}, not {chosen}")
        if chosen not in existing and due(ledger, config, chosen) is None:
            raise ValueError(
                f"run {ledger.run!r} does not wait before iteration {chosen}, and approval.before and approval.every "
                "name no gate there"
            )
        is_open = chosen in existing and existing[chosen].state is not GateState.APPROVED
        begun = ledger.markers(chosen) or chosen < ledger.first_iteration
        if begun and not is_open:  # a gate that was recorded as its iteration began stops the next one
            raise ValueError(f"iteration {chosen} of run {ledger.run!r} has begun: its gate has passed")
        return Verdict(iteration=chosen, approved=approved)

    return ledger.decisions.record(verdict, by=by, why=why)


def ask(ledger: Ledger, why: str, by: str | None = None) -> Decision | None:
    """Let a run wait before the next iteration that has not begun, for a reason that a program has found, such as a
    regression in an external evaluation. Its driver finds the gate before it begins that iteration, or the one after.

    Each reason opens one gate: returns None and records nothing where the same reason was recorded before, or the run
    is rejected. If the run already waits, its gate stays in place and gets the reason in addition. Raises ValueError
    with a sentence where the run has begun all its iterations.
    """
    total = from_manifest(ledger.manifest.config).rollout.num_rollout

    def place_and_reasons(so_far: tuple[Decision, ...]) -> tuple[int, str]:
        if any(isinstance(one.what, Gate) and why in (one.why or "") for one in so_far):
            raise _NothingToRecord
        unapproved = [gate for _, gate in sorted(gates(so_far).items()) if gate.state is not GateState.APPROVED]
        if any(gate.state is GateState.REJECTED for gate in unapproved):
            raise _NothingToRecord
        if unapproved:
            first = unapproved[0]
            before = first.gate.why if first.gate else None
            return first.iteration, "; ".join(filter(None, (before, why)))
        newest = ledger.last_iteration()
        following = 0 if newest is None else newest + 1
        if following >= total:
            raise ValueError(f"run {ledger.run!r} has begun all its {total} iterations: no gate is left")
        return following, why

    try:
        _, reasons = place_and_reasons(ledger.decisions.all())
        return ledger.decisions.record(
            lambda so_far: Gate(iteration=place_and_reasons(so_far)[0], cause="asked"), by=by, why=reasons
        )
    except _NothingToRecord:
        return None


class _NothingToRecord(Exception):
    """Nothing is to be recorded."""


def _undecided(ledger: Ledger, existing: dict[int, GateStatus]) -> int:
    waiting = [i for i, gate in sorted(existing.items()) if gate.state is not GateState.APPROVED]
    if not waiting:
        raise ValueError(f"run {ledger.run!r} is not waiting; name an iteration to decide in advance")
    return waiting[0]


def _fall(ledger: Ledger, config: RunConfig, index: int) -> str | None:
    """Return a sentence if the newest evaluation that the iteration may know of is new to it, and its score is below
    the best since a drop was last approved; else None."""
    fall, newest = config.approval.eval_drop, index - 1 - config.rollout.weights_lag
    if fall is None or newest < 0:
        return None
    benchmark = next(benchmark for benchmark in config.eval.benchmarks if benchmark.name == fall.benchmark)
    since = _last_approved_fall(ledger, index) - 1 - config.rollout.weights_lag
    places = [place for place in evaluations(ledger) if max(since, 0) <= place[0] <= newest]
    found = scored(ledger, benchmark, places)
    scores = [(iteration, metrics[fall.benchmark]) for iteration, _, metrics in found if fall.benchmark in metrics]
    if not scores or scores[-1][0] != newest:
        return None
    best, last = max(score for _, score in scores), scores[-1][1]
    if best - last < fall.drop:
        return None
    return f"{fall.benchmark} fell from {best:.3f} to {last:.3f}, by {fall.drop:g} or more"


def _last_approved_fall(ledger: Ledger, index: int) -> int:
    """Return the iteration before which a drop was last approved, in a parent's gates too; 0 if none was."""
    found = 0 if ledger.parent is None else _last_approved_fall(ledger.parent, ledger.first_iteration)
    for iteration, gate in gates(ledger.decisions.known).items():
        fallen = gate.gate is not None and isinstance(gate.gate.what, Gate) and gate.gate.what.cause == "eval_drop"
        if fallen and gate.state is GateState.APPROVED and iteration < index:
            found = max(found, iteration)
    return found
