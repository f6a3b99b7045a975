"""Reactions to a score below a baseline: Prefect's event `cairn.evaluation.regressed`, for its automations, and on
request an approval gate of the evaluated run (`cairn.flows.reading.gates`)."""

from collections.abc import Callable, Sequence

from cairn.flows.evaluation.comparing import Comparison, compare, find_baseline, name_of, questions_digest
from cairn.flows.evaluation.evaluating import EvaluationResult
from cairn.flows.evaluation.models import BadPlace
from cairn.flows.reading.gates import ask
from cairn.storage.evals import Evaluation, results
from cairn.storage.ledger.decisions import Gate
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.store.store import Store

Says = Callable[[str], None]

REGRESSED = "cairn.evaluation.regressed"
"""Name of the event."""


def regressions(
    store: Store,
    evaluated: Sequence[EvaluationResult],
    baseline: str,
    margin: float,
    says: Says,
    *,
    gate: str | None = None,
) -> list[str]:
    """Return sentences on the results that are worse than the baseline's, and emit a Prefect event for each. `gate`:
    the run that must then wait for a person. Raises BadPlace where the baseline has no result to compare with."""
    stored = list(results(store))
    sentences = []
    for one in evaluated:
        comparable = [other for other in stored if questions_digest(other) == questions_digest(one.result)]
        against = find_baseline(comparable, baseline)
        if against is None:
            names = ", ".join(sorted({name_of(other) for other in comparable}))
            raise BadPlace(
                f"there is no result of {baseline} on these questions of {one.result.key.benchmark}: evaluate it "
                f"first. Results exist for {names}; equal weights share one result, under the name of their first "
                "evaluation or the start of their digest"
            )
        comparison = compare(store, one.result, against, margin)
        text = sentence(one.result, against, comparison)
        says(text)
        if comparison.regressed:
            sentences.append(text)
            raise_event(one.result, against, comparison, says)
            if gate is not None:
                open_gate(store, gate, text, says)
    return sentences


def open_gate(store: Store, run: str, why: str, says: Says) -> None:
    """Let a run wait for approval before its next iteration, once for each reason, and report it through `says`."""
    try:
        decision = ask(Ledger.open(store, run), why)
    except ValueError as error:
        says(str(error))
        return
    if decision is None or not isinstance(decision.what, Gate):
        says(f"run {run} is rejected, or already waits for this reason")
        return
    iteration = decision.what.iteration
    place = f"{run}@{iteration}"
    says(f"Run {run} will wait before iteration {iteration}: cairn approve {place}, or cairn reject {place}")


def evaluated_run(place: str | None) -> str:
    """Return the run of RUN, RUN@ITER or RUN@A:B, for the gate. Raises BadPlace where a model folder is evaluated."""
    if place is None:
        raise BadPlace("a model folder has no approval gate: name a run to evaluate")
    return place.partition("@")[0]


def raise_event(
    result: Evaluation,
    baseline: Evaluation,
    comparison: Comparison,
    says: Says = lambda sentence: None,
) -> bool:
    """Emit a Prefect event for a regression, where an API is configured; return whether it was emitted. Never raises:
    errors go to `says`."""
    try:
        from prefect.context import FlowRunContext
        from prefect.events import emit_event

        from cairn.flows.orchestration.server import configured_api

        if configured_api() is None and FlowRunContext.get() is None:
            return False
        emitted = emit_event(
            REGRESSED,
            resource={
                "prefect.resource.id": f"cairn.evaluation.{result.key.digest[:16]}",
                "prefect.resource.name": f"{result.key.benchmark} on {name_of(result)}",
                "cairn.benchmark": result.key.benchmark,
            },
            payload={
                "benchmark": result.key.benchmark,
                "model": name_of(result),
                "baseline": name_of(baseline),
                "score": result.metrics["score"],
                "baseline_score": baseline.metrics["score"],
                "difference": comparison.difference,
                "interval": [comparison.low, comparison.high],
                "result": result.key.folder,
            },
        )
        return emitted is not None
    except Exception as error:  # any failure of the server or its client: the result is stored without it
        says(f"the regression could not be reported to Prefect: {type(error).__name__}: {error}")
        return False


def sentence(result: Evaluation, baseline: Evaluation, comparison: Comparison) -> str:
    """Return a sentence on a result compared with a baseline."""
    return (
        f"{result.key.benchmark} on {name_of(result)}: {comparison.verdict} against {name_of(baseline)}, "
        f"{result.metrics['score']:.3f} after {baseline.metrics['score']:.3f} "
        f"({comparison.difference:+.3f}, 95 % interval {comparison.low:+.3f} to {comparison.high:+.3f})"
    )
