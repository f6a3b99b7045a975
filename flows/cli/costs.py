"""`cairn costs` and `cairn timeline`: where the time of a run went."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.flows.cli.app import BadInput, JsonOption, RunArgument, StoreOption, print_json, say, writing
from cairn.flows.cli.reading import open_ledger
from cairn.storage.layout import LAST_NUMBER

if TYPE_CHECKING:
    from rich.table import Table

    from cairn.flows.costs.costs import Costs


def costs(
    run: RunArgument,
    price: Annotated[
        float | None, typer.Option("--price", metavar="P", min=0, help="Of a device for an hour, in any currency.")
    ] = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Say what a run cost: device-seconds and tokens by step, per accepted sample and evaluation, and what was wasted.

    A device is a GPU where the run has any, and else a CPU thread of an engine's. Reads every commit and lease of the
    run, and no samples. What a fork shares with its parent stands in the parent's costs.

    Examples:

    - `cairn costs quickstart`
    - `cairn costs quickstart --price 2.50`
    - `cairn costs quickstart --json | jq '.wasted[] | select(.after_fault)'`
    """
    from cairn.flows.costs.costs import run_costs

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
    """Write an iteration as a trace that https://ui.perfetto.dev opens: engines as rows, steps and new tries as slices.

    The format is Chrome's. Each slice carries its commit's metrics, timings and inputs. An iteration that is not
    complete shows the steps that it has.

    Examples:

    - `cairn timeline quickstart 12 trace.json`
    """
    from json import dumps

    from cairn.configs.loader import from_manifest
    from cairn.flows.costs.timeline import trace

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
    """The sums in sentences, the parts in tables."""
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
