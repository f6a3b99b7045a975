"""`cairn rescore`: what the rewards of a run would have been."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.flows.cli.app import BadInput, JsonOption, StoreOption, print_json, say
from cairn.flows.cli.reading import open_ledger

if TYPE_CHECKING:
    from cairn.flows.rescore.rescored import Rescored


def rescore(
    place: Annotated[
        str, typer.Argument(metavar="RUN[@ITER|@A:B]", help="A run, one iteration of it, or those from A to B.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="reward.OPTION=VALUE", help="Change one option of the grader; may be repeated."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="FILE", help="A Parquet file, not there yet, for the rewards of each sample."),
    ] = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Grade the samples of a run again, by another grader or by today's code of its own, and say what changes.

    Nothing is sampled and nothing trained: these are the rewards that the same responses would have had. The run is
    left as it is, and may be running. A response that failed when it was generated stays failed.

    Examples:

    - `cairn rescore quickstart` by the run's own grader, as its code is today
    - `cairn rescore quickstart --set reward.rm_type=gsm8k`
    - `cairn rescore quickstart@0:9 --set reward.custom_rm_path=rewards.py:grade --write rewards.parquet`
    - `cairn rescore quickstart@39 --set reward.rm_type=math --json | jq .overall`
    """
    from cairn.flows.cli.tables import reporting
    from cairn.flows.rescore.rescored import write_parquet
    from cairn.flows.rescore.rescoring import CannotRescore
    from cairn.flows.rescore.rescoring import rescore as rescored

    run, at, iterations = place.partition("@")
    if write is not None:
        _require_free(write)
    ledger = open_ledger(store, run)
    with reporting() as tell:
        try:
            found, rows = rescored(ledger, iterations if at else None, overrides or [], tell)
        except CannotRescore as error:
            raise BadInput(str(error)) from None
    if write is not None:
        try:
            write_parquet(rows, write)
        except FileExistsError:
            _require_free(write)
    if json:
        print_json(found.model_dump(mode="json"))
    else:
        _print(found)


def _require_free(file: Path) -> None:
    if file.exists():
        raise BadInput(f"{file} is there already: give another name")
    if not file.parent.is_dir():
        raise BadInput(f"{file} cannot be written: there is no folder {file.parent}")
    if not os.access(file.parent, os.W_OK):
        raise BadInput(f"{file} cannot be written: the folder {file.parent} may not be written to")


def _print(found: "Rescored") -> None:
    from rich.table import Table
    from rich.text import Text

    from cairn.flows.cli.tables import console
    from cairn.flows.rescore.rescored import HEADER

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in HEADER:
        table.add_column(name, justify="right")
    for line in found.lines():
        table.add_row(*map(Text, line))
    console().print(table)
    for sentence in found.sentences():
        say(sentence)
    say(found.conclusion())
