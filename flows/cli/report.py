"""`cairn report`: a run as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from cairn.flows.cli.app import BadInput, JsonOption, RunArgument, StoreOption, print_json, say, writing
from cairn.flows.cli.reading import open_ledger


def report(
    run: RunArgument,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Where the page goes; RUN.html by default.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Hold every byte of the run against its digest, and say so.")
    ] = True,
    price: Annotated[
        float | None, typer.Option("--price", metavar="P", min=0, help="Of a device for an hour, in any currency.")
    ] = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Write a run as one HTML page that works offline: curves, time, samples, lineage, verification.

    The page has all samples of the run to search, filter and sort, and of 500 of them every token with its log-prob,
    ratio, advantage, age and mask. It loads nothing and sends nothing. A file that is there already is replaced.

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
