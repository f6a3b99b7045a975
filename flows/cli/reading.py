"""Commands that look and change nothing: runs, status, show, verify."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.flows.cli import tables
from cairn.flows.cli.app import (
    FAILED,
    BadInput,
    EvalsOption,
    JsonOption,
    OptionalRunArgument,
    RunArgument,
    StoreOption,
    print_json,
    require_one,
)
from cairn.storage.layout import LAST_NUMBER

if TYPE_CHECKING:
    from cairn.storage.ledger import Ledger
    from cairn.storage.signatures import Signed
    from cairn.storage.store import Store


def runs(json: JsonOption = False, store: StoreOption = ".") -> None:
    """List all runs of a store: how far each is, its reward, and when it last committed something.

    States: *new* (a fork that no driver has owned), *running* (a live driver owns it), *completed*, *failed*,
    *interrupted* (stopped or killed; `cairn resume` goes on), *preempted* (the machine was wanted; the same),
    *waiting* (for a person: `cairn approve`), *rejected* (by one), *damaged* (see `cairn verify`).

    Examples:

    - `cairn runs`
    - `cairn runs --store s3://bucket/experiments --json`
    """
    from cairn.flows.reading.views import all_runs

    found = all_runs(answering_store(store))
    if json:
        print_json([status.model_dump(mode="json") for status in found])
    else:
        tables.print_runs(found, store)


def status(run: RunArgument, json: JsonOption = False, store: StoreOption = ".") -> None:
    """Say where a run stands: its state and driver, the step it is in, its weights, rewards and evaluations, and which
    of rollout engines and trainer waits for the other.

    `balance` is measured over the newest iterations, ten at most, and names options that would make the run faster.
    `state_digest` is the fingerprint of weights and optimizer: two runs with equal digests are bit for bit the same.

    Examples:

    - `cairn status quickstart`
    - `cairn status quickstart --json | jq -r .state_digest`
    - `cairn status quickstart --json | jq '.balance | {trainer_wait, rollout_wait, bottleneck, advice}'`
    """
    from cairn.configs.loader import from_manifest
    from cairn.flows.costs.balance import measured
    from cairn.flows.plan.balancing import advice, spelled
    from cairn.flows.reading.views import run_status
    from cairn.storage.errors import Damaged

    ledger = open_ledger(store, run)
    found = run_status(ledger.store, run)
    recorded = ledger.manifest.config
    config = from_manifest(recorded)
    try:
        balance = measured(ledger, config, found.iterations)
    except Damaged:  # in an iteration that is over, which `cairn verify` finds: where the run stands can be said
        balance = None
    changes = advice(balance, recorded, config) if balance else ()
    if json:
        told = {**balance.model_dump(mode="json"), "advice": changes} if balance else None
        print_json({**found.model_dump(mode="json"), "balance": told})
    else:
        tables.print_status(found, spelled(balance, changes, config) if balance else None)


def show(
    run: RunArgument,
    iteration: Annotated[
        int, typer.Argument(metavar="ITER", min=0, max=LAST_NUMBER, help="Number of the iteration, from 0.")
    ],
    sample: Annotated[int | None, typer.Option("--sample", metavar="N", min=0, help="Only sample number N.")] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="At most N samples.")] = 4,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Show samples of an iteration: prompt, response, reward and advantage, and whether they were trained on. Of one of
    several turns, what the world gave and the policy answered in each, and every call of a tool or a grader.

    Examples:

    - `cairn show quickstart 0` shows the first samples of the first iteration
    - `cairn show quickstart 39 --sample 17`
    - `cairn show quickstart 39 --limit 1000 --json | jq '.[].reward'`
    """
    from cairn.flows.reading.samples import iteration_samples, with_episodes

    try:
        ledger = open_ledger(store, run)
        found = iteration_samples(ledger, iteration)
    except LookupError as error:
        raise BadInput(str(error)) from None
    if sample is not None and sample >= len(found):
        raise BadInput(f"iteration {iteration} of run {run!r} has samples 0 to {len(found) - 1}, no {sample}")
    chosen = with_episodes(ledger, found[:limit] if sample is None else [found[sample]])
    if json:
        print_json([view.model_dump(mode="json") for view in chosen])
    else:
        tables.print_samples(chosen, len(found))


def verify(
    run: OptionalRunArgument = None,
    evals: EvalsOption = False,
    signers: Annotated[
        Path | None,
        typer.Option("--signers", metavar="FILE", help="Lines of NAME KEY: whose signature every commit must have."),
    ] = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Read all of a run again and hold every byte against its digest, and every commit against its inputs; account for
    every group that was generated. With --evals all results of evaluations, which are the store's, and no run's.

    Exits with 1 if anything is missing, altered or made from something else than the ledger says, and if a group is
    trained on twice or lost. With `--signers` it says who wrote what, and whatever none of them has signed is a
    finding; `cairn keygen` makes keys.

    Examples:

    - `cairn verify quickstart`
    - `cairn verify quickstart --json | jq '.findings, .groups'`
    - `cairn verify --evals`
    - `cairn verify quickstart --signers team.txt`
    - `cairn verify --evals --signers team.txt`
    """
    require_one(run, evals)
    if run is None:
        from cairn.flows.cli.evaluation_upkeep import verify_evals

        return verify_evals(answering_store(store), read_signers_of(signers), json)
    from cairn.storage.verification import verify as verified

    names = read_signers_of(signers)
    checks = list(tables.with_progress(verified(open_ledger(store, run)), hidden=json))
    findings = [finding for check in checks for finding in check.findings]
    signed = _signed(open_ledger(store, run), names) if names else []
    unsigned = [one for one in signed if one.problem]
    if json:
        upgrades = sum(check.name.startswith("upgrades/") for check in checks)
        decisions = sum(check.name.startswith("decisions/") for check in checks)
        counts = {
            "commits": sum(check.is_commit for check in checks),
            "upgrades": upgrades,
            "decisions": decisions,
            "files": sum(c.files for c in checks),
            "bytes": sum(c.bytes for c in checks),
            "retired": sum(c.retired for c in checks),
            "redacted": sum(c.redacted for c in checks),
            "groups": next(c.groups.model_dump(mode="json") for c in checks if c.groups is not None),
        }
        found = [finding.model_dump(mode="json") for finding in findings]
        found += [{"fault": "unsigned", "path": one.path, "message": one.problem} for one in unsigned]
        wrote = {one.path: one.signer for one in signed if one.signer}
        print_json({"run": run, **counts, **({"signers": wrote} if names else {}), "findings": found})
    else:
        tables.print_verified(run, checks)
        if names:
            tables.print_signed(signed)
    if findings or unsigned:
        raise typer.Exit(FAILED)
    return None


def read_signers_of(file: Path | None) -> dict[str, str]:
    """Names by key, of the file that `--signers` names; none without it."""
    if file is None:
        return {}
    from cairn.storage.signatures import read_signers

    try:
        return read_signers(file)
    except OSError as error:
        raise BadInput(f"the file of signers {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(str(error)) from None


def _signed(ledger: "Ledger", signers: dict[str, str]) -> list["Signed"]:
    from cairn.storage.signatures import check_signatures

    return list(check_signatures(ledger, signers))


def open_ledger(store_url: str, run: str) -> "Ledger":
    """The ledger of a run that exists. Raises BadInput if there is none."""
    from cairn.storage.ledger import Ledger

    try:
        return Ledger.open(answering_store(store_url), run)
    except (FileNotFoundError, ValueError) as error:
        raise BadInput(str(error)) from None


def answering_store(url: str) -> "Store":
    """The store, after it has answered: else a wrong endpoint would be waited for as if it were an outage."""
    from cairn.storage.store import open_store

    store = open_store(url)
    store.check()
    return store
