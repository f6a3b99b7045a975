"""Commands that read and change nothing: runs, status, show, verify, costs, timeline, report."""

from collections.abc import Mapping
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
    require_one,
    writing,
)
from cairn.flows.cli.printing import print_json, say
from cairn.storage.ledger.layout import LAST_NUMBER

if TYPE_CHECKING:
    from rich.table import Table

    from cairn.flows.reading.costs import Costs
    from cairn.storage.ledger.ledger import Ledger
    from cairn.storage.store.store import Store
    from cairn.storage.upkeep.signatures import Signed


# `verify --evals` and `gc --evals`.


def verify_evals(store: "Store", signers: Mapping[str, str], json: bool) -> None:
    """Read all results again, and check all signatures if there are signers. Exits with 1 if something is wrong."""
    from cairn.storage.upkeep.evals import verify

    checks = list(tables.with_progress(verify(store), hidden=json))
    findings = [finding for check in checks for finding in check.findings]
    signed = _signed_evals(store, signers) if signers else []
    unsigned = [one for one in signed if one.problem]
    files, size = sum(check.files for check in checks), sum(check.bytes for check in checks)
    if json:
        found = [finding.model_dump(mode="json") for finding in findings]
        found += [{"fault": "unsigned", "path": one.path, "message": one.problem} for one in unsigned]
        wrote = {"signers": {one.path: one.signer for one in signed if one.signer}} if signers else {}
        print_json({"results": len(checks), "files": files, "bytes": size, **wrote, "findings": found})
    else:
        for finding in findings:
            say(f"{finding.fault}: {finding.message}")
        verdict = f"{len(findings)} findings" if findings else "every byte is what was committed"
        say(f"evaluations: {len(checks)} results, {files} files, {size / 1e6:.1f} MB read; {verdict}")
        if signers:
            tables.print_signed(signed)
    if findings or unsigned:
        raise typer.Exit(FAILED)


def _signed_evals(store: "Store", signers: Mapping[str, str]) -> list["Signed"]:
    from cairn.storage.upkeep.signatures import check_result_signatures

    return list(check_result_signatures(store, signers))


def gc_evals(store: "Store", apply: bool, json: bool) -> None:
    """List files of evaluations that nothing needs; with `apply` remove them."""
    from cairn.storage.upkeep.evals import collect, garbage

    found = list(garbage(store))
    if apply:
        collect(store, found)
    if json:
        print_json({"removed": apply, "garbage": [one.model_dump(mode="json") for one in found]})
        return
    for one in found:
        say(f"{one.reason}: {one.path}")
    size = sum(one.bytes or 0 for one in found) / 1e6
    end = "removed" if apply else "can be removed: run `cairn gc --evals --apply`" if found else "can be removed"
    say(f"evaluations: {len(found)} files, {size:.1f} MB, {end}")


def runs(json: JsonOption = False, store: StoreOption = ".") -> None:
    """List all runs of a store: progress, reward, and time of the last commit.

    States: *new* (a fork that no driver has owned), *running* (a live driver owns it), *completed*, *failed*,
    *interrupted* (stopped or killed; `cairn resume` continues it), *preempted* (the machine was needed; `cairn resume`
    continues it), *waiting* (for a person: `cairn approve`), *rejected* (by a person), *damaged* (see `cairn verify`).

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
    """Show the status of a run: its state and driver, its current step, its weights, rewards and evaluations, and
    whether the rollout engines wait for the trainer or the reverse.

    `balance` is measured over the newest iterations, ten at most, and names options on which the bottleneck depends.
    `state_digest` is the fingerprint of weights and optimizer: two runs with equal digests are identical bit for bit.

    Examples:

    - `cairn status quickstart`
    - `cairn status quickstart --json | jq -r .state_digest`
    - `cairn status quickstart --json | jq '.balance | {trainer_wait, rollout_wait, bottleneck, hints}'`
    """
    from cairn.configs.loader import from_manifest
    from cairn.flows.reading.balance import measured
    from cairn.flows.reading.views import run_status
    from cairn.storage.store.errors import Damaged

    ledger = open_ledger(store, run)
    found = run_status(ledger.store, run)
    config = from_manifest(ledger.manifest.config)
    try:
        balance = measured(ledger, config, found.iterations)
    except Damaged:  # in an iteration that is over, which `cairn verify` finds: where the run stands can be said
        balance = None
    if json:
        shown = {**balance.model_dump(mode="json"), "hints": balance.hints} if balance else None
        print_json({**found.model_dump(mode="json"), "balance": shown})
    else:
        tables.print_status(found, balance.sentence(config) if balance else None)


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
    """Show samples of an iteration: prompt, response, reward and advantage, and whether they were trained on.

    A sample with several turns is shown turn by turn: the input of the environment, the answer of the policy, and every
    call of a tool or a grader.

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
        raise BadInput(f"iteration {iteration} of run {run!r} has samples 0 to {len(found) - 1}, not {sample}")
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
        typer.Option("--signers", metavar="FILE", help="Lines of NAME KEY: one of them must have signed every commit."),
    ] = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Read a whole run again, and check every byte against its digest and every commit against its inputs.

    The command also accounts for every generated group. Exits with 1 if anything is missing, altered or made from
    something else than the ledger says, or if a group is trained on twice or lost. With --evals it checks all
    evaluation results instead, which belong to the store and not to a run.

    With `--signers` it shows the authors of all files; a file that no signer has signed is a finding. `cairn keygen`
    creates keys.

    Examples:

    - `cairn verify quickstart`
    - `cairn verify quickstart --json | jq '.findings, .groups'`
    - `cairn verify --evals`
    - `cairn verify quickstart --signers team.txt`
    - `cairn verify --evals --signers team.txt`
    """
    require_one(run, evals)
    if run is None:
        return verify_evals(answering_store(store), read_signers_of(signers), json)
    from cairn.storage.upkeep.verification import verify as verified

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
    """Return names by key from the file that `--signers` names; an empty mapping without it."""
    if file is None:
        return {}
    from cairn.storage.upkeep.signatures import read_signers

    try:
        return read_signers(file)
    except OSError as error:
        raise BadInput(f"the file of signers {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(str(error)) from None


def _signed(ledger: "Ledger", signers: dict[str, str]) -> list["Signed"]:
    from cairn.storage.upkeep.signatures import check_signatures

    return list(check_signatures(ledger, signers))


def open_ledger(store_url: str, run: str) -> "Ledger":
    """Return the ledger of a run. Raises BadInput if the run does not exist."""
    from cairn.storage.ledger.ledger import Ledger

    try:
        return Ledger.open(answering_store(store_url), run)
    except (FileNotFoundError, ValueError) as error:
        raise BadInput(str(error)) from None


def answering_store(url: str) -> "Store":
    """Return the store after it has responded: a command must not wait for a wrong endpoint as in an outage."""
    from cairn.storage.opening import open_store

    store = open_store(url)
    store.check()
    return store


# `cairn costs` and `cairn timeline`: where the time of a run went.


def costs(
    run: RunArgument,
    price: Annotated[
        float | None, typer.Option("--price", metavar="P", min=0, help="Price of a device per hour, in any currency.")
    ] = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Show what a run cost: device-seconds and tokens by step, per accepted sample and evaluation, and what was wasted.

    A device is a GPU if the run has any, else a CPU thread of an engine. The command reads every commit and lease of
    the run, but no samples. The iterations that a fork shares with its parent count in the parent's costs.

    Examples:

    - `cairn costs quickstart`
    - `cairn costs quickstart --price 2.50`
    - `cairn costs quickstart --json | jq '.wasted[] | select(.after_fault)'`
    """
    from cairn.flows.reading.costs import run_costs

    found = run_costs(open_ledger(store, run), price)
    if json:
        print_json(found.model_dump(mode="json"))
    else:
        print_costs(found)


def timeline(
    run: RunArgument,
    iteration: Annotated[
        int, typer.Argument(metavar="ITER", min=0, max=LAST_NUMBER, help="Number of the iteration, from 0.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the trace.")],
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Write an iteration as a trace for https://ui.perfetto.dev: engines are rows, steps and retries are slices.

    The format is Chrome's. Each slice has its commit's metrics, timings and inputs. An incomplete iteration shows the
    steps that it has.

    Examples:

    - `cairn timeline quickstart 12 trace.json`
    """
    from json import dumps

    from cairn.configs.loader import from_manifest
    from cairn.flows.reading.timeline import trace

    ledger = open_ledger(store, run)
    commits = ledger.commits(iteration)
    if not commits:
        raise BadInput(f"run {run!r} has no commit in iteration {iteration}; `cairn status {run}` says how far it is")
    made = trace(commits, from_manifest(ledger.manifest.config))
    with writing(file):
        file.write_text(dumps(made), encoding="utf-8")
    slices = sum(event["ph"] == "X" for event in made["traceEvents"])
    if json:
        print_json({"file": str(file), "commits": len(commits), "slices": slices})
    else:
        say(f"{len(commits)} commits of iteration {iteration} of run {run}; open it at https://ui.perfetto.dev:")
        say(str(file))


def print_costs(found: "Costs") -> None:
    """Print the sums as sentences, and the parts as tables."""
    from cairn.flows.cli.tables import console

    held, unit = found.devices, f"{found.devices.kind}-seconds"
    shown, has_price = console(), found.price is not None
    said = f"run {found.run}: {found.reserved_device_seconds:,.1f} {unit} reserved"
    said += f" ({held.reserved:g} {held.kind}s, {found.drivers} drivers), {found.iterations} iterations"
    say(said + (f", price {found.price:,.2f}" if has_price else ""))
    table = _table(("step", "commits", "seconds", unit, "tokens"), has_price)
    for cost in found.steps:
        _row(table, has_price, cost.step, cost.commits, cost.seconds, cost.device_seconds, cost.tokens, cost.price)
    for name in ("starting", "idle", "uncommitted"):
        spent = getattr(found, f"{name}_device_seconds")
        rate = found.price_per_device_hour
        _row(table, has_price, name, None, None, spent, None, None if rate is None else spent / 3600 * rate)
    shown.print(table)
    said = f"{found.accepted_samples:,} samples accepted of {found.generated_samples:,} generated"
    if found.learns_from != "responses":
        said = f"{found.accepted_samples:,} samples of {found.learns_from} trained on"
    say(said + _each(found, unit))
    if found.evaluations:
        table = _table(("evaluation", "samples", "seconds", unit, "tokens"), has_price)
        for one in found.evaluations:
            name = f"{one.benchmark} after {one.trained}" + (", apart" if one.apart else "")
            _row(table, has_price, name, one.samples, one.seconds, one.device_seconds, one.tokens, one.price)
        shown.print(table)
    if found.wasted:
        table = _table(("wasted", "count", "unit", unit, "tokens"), has_price)
        for waste in found.wasted:
            price, name = waste.price, waste.cause
            _row(table, has_price, name, waste.count, waste.unit, waste.device_seconds, waste.tokens, price)
        shown.print(table)
    else:
        say("nothing was wasted")


def _each(found: "Costs", unit: str) -> str:
    spent, tokens = found.device_seconds_per_accepted_sample, found.tokens_per_accepted_sample
    return "" if spent is None or tokens is None else f"; each took {spent:,.2f} {unit} and {tokens:,.1f} tokens"


def _table(columns: tuple[str, ...], has_price: bool) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for number, name in enumerate((*columns, "price") if has_price else columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def _row(table: "Table", has_price: bool, *cells: object) -> None:
    table.add_row(*map(_spell, cells if has_price else cells[:-1]))


def _spell(cell: object) -> str:
    match cell:
        case None:
            return "–"
        case float():
            return f"{cell:,.2f}"
        case int():
            return f"{cell:,}"
    return str(cell)


# `cairn report`: a run as one HTML file.


def report(
    run: RunArgument,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="File of the page; RUN.html by default.")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify", help="Compare every byte of the run with its digest, and show the result."
        ),
    ] = True,
    price: Annotated[
        float | None, typer.Option("--price", metavar="P", min=0, help="Price of a device per hour, in any currency.")
    ] = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Write a run as one HTML page that works offline: curves, time, samples, lineage, verification.

    You can search, filter and sort all samples of the run in the page. For 500 of them it shows every token with its
    log-prob, ratio, advantage, age and mask. The page loads nothing and sends nothing. An existing file is replaced.

    Examples:

    - `cairn report quickstart` writes quickstart.html
    - `cairn report quickstart build/report.html --no-verify` leaves out reading checkpoints again
    - `cairn report quickstart --price 2.50` says what it cost in money too
    - `cairn report quickstart --json | jq .bytes`
    """
    from rich.console import Console

    from cairn.flows.report.build import write_report

    ledger = open_ledger(store, run)
    target = Path(f"{run}.html") if file is None else file
    if target.is_dir():
        raise BadInput(f"{target} is a folder; name a file, such as {target / f'{run}.html'}")
    if not target.absolute().parent.is_dir():
        raise BadInput(f"there is no folder {target.absolute().parent}")
    with Console(stderr=True, quiet=json).status("reading") as line:

        def tell(what: str, done: int, of: int) -> None:
            line.update(f"{what}: {done} of {of}" if of else f"{what}: {done}")

        with writing(target):
            made = write_report(ledger, target, tell, verified=verify, price=price)
    if json:
        print_json(made.model_dump(mode="json"))
        return
    size = f"{made.bytes / 1e6:.1f} MB, {made.iterations} iterations, {made.samples:,} samples"
    say(f"{made.file}: {size}, {made.with_tokens:,} of them with tokens")
    if made.findings:
        say(f"{made.findings} findings of the ledger's verification are in it: see `cairn verify {run}`")
