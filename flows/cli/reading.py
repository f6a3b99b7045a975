"""Commands that read and change nothing: runs, status, show, costs, timeline, report."""

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import chain
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from cairn.configs.errors import BadInput
from cairn.flows.cli import tables
from cairn.flows.cli.command import (
    IterationArgument,
    JsonOption,
    Root,
    RunArgument,
    SampleArgument,
    Shown,
    writing,
)
from cairn.flows.reading.address import iteration_of, samples_of, the_sample
from cairn.flows.text import size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from cairn.flows.reading.costs import Costs
    from cairn.flows.reading.views import RunStatus

PriceOption = Annotated[
    float | None, Option("--price", metavar="P", min=0, help="Price of a device per hour, in any currency.")
]


class Order(StrEnum):
    """Order of runs: names from a to z, everything else with the greatest first."""

    NAME = "name"
    REWARD = "reward"
    ITERATIONS = "iterations"
    NEWEST = "newest"


def runs(
    root: Root,
    pattern: Annotated[
        str, Argument(metavar="[PATTERN]", help="Only runs whose names match, such as 'gsm8k-*'.")
    ] = "*",
    state: Annotated[
        list[str] | None, Option("--state", metavar="STATE", help="Only runs in this state; may be repeated.")
    ] = None,
    sort: Annotated[Order, Option("--sort", help="Order of the runs; newest: by their last commit.")] = Order.NAME,
) -> Shown:
    """List the runs of a store.

    States: *new* (a fork that no driver has owned), *running* (a live driver owns it), *completed*, *failed*,
    *interrupted* (stopped or killed; `cairn resume` continues it), *preempted* (the machine was needed; `cairn resume`
    continues it), *waiting* (for a person: `cairn approve`), *rejected* (by a person), *damaged* (see `cairn verify`).

    Examples:

    - `cairn runs`
    - `cairn runs 'gsm8k-*' --state failed --state interrupted --sort newest`
    - `cairn runs --store s3://bucket/experiments --sort reward --json`
    """
    from cairn.flows.reading.views import RunState, all_runs

    for name in state or ():
        if name not in list(RunState):
            raise BadInput(f"--state {name} is not a state of a run; states are {', '.join(RunState)}")
    keys: dict[Order, Callable[[RunStatus], float]] = {
        Order.REWARD: lambda status: -inf if status.reward is None else status.reward,
        Order.ITERATIONS: lambda status: status.iterations,
        Order.NEWEST: lambda status: status.last_commit_at or 0,
    }
    found = all_runs(root.store, lambda run: fnmatchcase(run, pattern))
    found = [status for status in found if not state or status.state in state]
    if sort in keys:
        found.sort(key=keys[sort], reverse=True)
    return Shown(found, tables.runs_table(found, root.url))


def status(root: Root, run: RunArgument) -> Shown:
    """Show a run's state, progress, scores and bottleneck.

    The bottleneck is who waits: the rollout engines for the trainer, or the reverse.
    `balance` is measured over the newest iterations, ten at most, and names options on which the bottleneck depends.
    `state_digest` is the fingerprint of weights and optimizer: two runs with equal digests are identical bit for bit.

    Examples:

    - `cairn status quickstart`
    - `cairn status quickstart --json | jq -r .state_digest`
    - `cairn status quickstart --json | jq '.balance | {trainer_wait, rollout_wait, bottleneck, hints}'`
    """
    from cairn.flows.reading.balance import measured
    from cairn.flows.reading.views import run_status
    from cairn.storage.store.errors import Damaged

    ledger = root.ledger(run)
    found = run_status(ledger.store, run)
    config = ledger.config
    try:
        balance = None if found.imported else measured(ledger, config, found.iterations)
    except Damaged:  # in an older iteration, which the status does not need
        balance = None
    shown = {**balance.model_dump(mode="json"), "hints": balance.hints} if balance else None
    text = tables.status_lines(found, balance.sentence(config) if balance else None)
    return Shown({**found.model_dump(mode="json"), "balance": shown}, text)


def show(
    root: Root,
    place: SampleArgument,
    limit: Annotated[int, Option("--limit", metavar="N", min=1, help="At most N samples.")] = 4,
) -> Shown:
    """Show samples of an iteration with reward and advantage.

    A sample with several turns is shown turn by turn: the input of the environment, the answer of the policy, and every
    call of a tool or a grader.

    Examples:

    - `cairn show quickstart` shows the first samples of the newest iteration
    - `cairn show quickstart@39/17`
    - `cairn show quickstart@39 --limit 1000 --json | jq '.[].reward'`
    """
    from cairn.flows.reading.samples import with_episodes
    from cairn.tasks.grading.failures import commonest

    ledger = root.ledger(place.run)
    iteration, found = samples_of(ledger, place)
    chosen = with_episodes(ledger, found[:limit] if place.sample is None else [the_sample(place, found, iteration)])
    failed = commonest((view.status, view.error) for view in found)
    head = [] if failed is None or place.sample is not None else [str(failed)]
    return Shown(chosen, chain(head, tables.sample_lines(chosen, len(found), alone=place.sample is not None)))


def costs(root: Root, run: RunArgument, price: PriceOption = None) -> Shown:
    """Show what a run cost by step, and what was wasted.

    The costs are device-seconds or device-hours, tokens, and money with `--price`. A device is a GPU if the run has
    any, else a CPU thread of an engine. The command reads every commit and lease of the run, but no samples. The
    iterations that a fork shares with its parent count in the parent's costs.

    Examples:

    - `cairn costs quickstart`
    - `cairn costs quickstart --price 2.50`
    - `cairn costs quickstart --json | jq '.wasted[] | select(.after_fault)'`
    """
    from cairn.flows.reading.costs import run_costs

    ledger = root.ledger(run)
    ledger.manifest.require_own("record of devices and of their time")
    found = run_costs(ledger, price)
    return Shown(found, _costs(found))


def timeline(
    root: Root,
    place: IterationArgument,
    file: Annotated[Path, Argument(metavar="FILE", help="Where to write the trace.")],
) -> Shown:
    """Write an iteration as a trace for https://ui.perfetto.dev.

    Engines are rows, steps and retries are slices. The format is Chrome's. Each slice has its commit's metrics, timings
    and inputs. An incomplete iteration shows the steps that it has.

    Examples:

    - `cairn timeline quickstart@12 trace.json`
    """
    from json import dumps

    from cairn.flows.reading.timeline import trace

    run, ledger = place.run, root.ledger(place.run)
    ledger.manifest.require_own("record of devices and of their time")
    iteration = iteration_of(ledger, place)
    commits = ledger.commits(iteration)
    if not commits:
        raise BadInput(f"run {run!r} has no commit in iteration {iteration}; `cairn status {run}` says how far it is")
    document = trace(commits, ledger.config_of)
    with writing(file):
        file.write_text(dumps(document), encoding="utf-8")
    slices = sum(event["ph"] == "X" for event in document["traceEvents"])
    text = f"{len(commits)} commits of iteration {iteration} of run {run}; open it at https://ui.perfetto.dev:"
    return Shown({"file": str(file), "commits": len(commits), "slices": slices}, [text, str(file)])


def _costs(found: "Costs") -> "Iterator[RenderableType]":
    """Yield the sums as sentences, and the parts as tables."""
    devices, has_price = found.devices, found.price is not None
    unit, scale = ("hours", 3600) if found.reserved_device_seconds >= 36000 else ("seconds", 1)
    unit = f"{devices.kind}-{unit}"
    text = f"run {found.run}: {found.reserved_device_seconds / scale:,.1f} {unit} reserved"
    text += f" ({devices.reserved:g} {devices.kind}s, {found.drivers} drivers), {found.iterations} iterations"
    yield text + (f", price {found.price:,.2f}" if has_price else "")
    width, rate = 6 if has_price else 5, found.price_per_device_hour
    rows: list[tuple[object, ...]] = [
        (cost.step, cost.commits, cost.seconds, cost.device_seconds / scale, cost.tokens, cost.price)
        for cost in found.steps
    ]
    for name in ("starting", "idle", "uncommitted"):
        spent = getattr(found, f"{name}_device_seconds")
        rows.append((name, None, None, spent / scale, None, None if rate is None else spent / 3600 * rate))
    yield _table(("step", "commits", "seconds", unit, "tokens", "price")[:width], rows)
    text = f"{found.accepted_samples:,} samples accepted of {found.generated_samples:,} generated"
    if found.learns_from != "responses":
        text = f"{found.accepted_samples:,} samples of {found.learns_from} trained on"
    yield text + _each(found, f"{devices.kind}-seconds")
    if found.evaluations:
        rows = [
            (
                f"{one.benchmark} after {one.trained}" + (", apart" if one.apart else ""),
                *(one.samples, one.seconds, one.device_seconds / scale, one.tokens, one.price),
            )
            for one in found.evaluations
        ]
        yield _table(("evaluation", "samples", "seconds", unit, "tokens", "price")[:width], rows)
    if found.wasted:
        rows = [
            (
                one.cause,
                one.count,
                one.unit,
                None if one.device_seconds is None else one.device_seconds / scale,
                one.tokens,
                one.price,
            )
            for one in found.wasted
        ]
        yield _table(("wasted", "count", "unit", unit, "tokens", "price")[:width], rows)
    else:
        yield "nothing was wasted"


def _each(found: "Costs", unit: str) -> str:
    spent, tokens = found.device_seconds_per_accepted_sample, found.tokens_per_accepted_sample
    return "" if spent is None or tokens is None else f"; each took {spent:,.2f} {unit} and {tokens:,.1f} tokens"


def _table(names: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> "Table":
    table = tables.grid(*names, right=names[1:])
    for row in rows:
        table.add_row(*map(_spell, row[: len(names)]))
    return table


def _spell(cell: object) -> str:
    match cell:
        case None:
            return "–"
        case float():
            return f"{cell:,.2f}"
        case int():
            return f"{cell:,}"
    return str(cell)


def report(
    root: Root,
    run: RunArgument,
    file: Annotated[Path | None, Argument(metavar="[FILE]", help="File of the page; RUN.html by default.")] = None,
    verify: Annotated[
        bool, Option("--verify/--no-verify", help="Compare every byte of the run with its digest, and show the result.")
    ] = True,
    price: PriceOption = None,
    json: JsonOption = False,
) -> Shown:
    """Write a run as one HTML page that works offline.

    It shows curves, time, samples, lineage and the verification. You can search, filter and sort all samples of the run
    in the page. For 500 of them it shows every token with its log-prob, ratio, advantage, age and mask. The page loads
    nothing and sends nothing. An existing file is replaced.

    Examples:

    - `cairn report quickstart` writes quickstart.html
    - `cairn report quickstart build/report.html --no-verify` leaves out reading checkpoints again
    - `cairn report quickstart --price 2.50` says what it cost in money too
    - `cairn report quickstart --json | jq .bytes`
    """
    from rich.console import Console

    from cairn.flows.report.build import write_report
    from cairn.storage.ledger.manifest import list_runs

    ledger = root.ledger(run)
    target = Path(f"{run}.html") if file is None else file
    if target.is_dir():
        raise BadInput(f"{target} is a folder; name a file, such as {target / f'{run}.html'}")
    if str(file) in list_runs(root.store):
        raise BadInput(f"{file} is a run, not a file to write: `cairn compare {run} {file}` shows both")
    if not target.absolute().parent.is_dir():
        raise BadInput(f"there is no folder {target.absolute().parent}")
    with Console(stderr=True, quiet=json).status("reading") as line:

        def progress(what: str, done: int, of: int) -> None:
            line.update(f"{what}: {done} of {of}" if of else f"{what}: {done}")

        with writing(target):
            written = write_report(ledger, target, progress, verified=verify, price=price)
    amount = f"{size(written.bytes)}, {written.iterations} iterations, {written.samples:,} samples"
    text = [f"{written.file}: {amount}, {written.with_tokens:,} of them with tokens"]
    if written.findings:
        text.append(f"{written.findings} findings of the ledger's verification are in it: see `cairn verify {run}`")
    return Shown(written, text)
