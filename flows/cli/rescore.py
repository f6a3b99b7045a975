"""`cairn rescore`: what the rewards of a run would have been."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.flows.cli.app import BadInput, JsonOption, StoreOption, print_json, say
from cairn.flows.cli.parquet import require_free, write_new
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
    reward: Annotated[
        str | None,
        typer.Option("--reward", metavar="NAME|PATH", help="Another grader: one of Cairn's by name, or your own."),
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
    - `cairn rescore quickstart --reward gsm8k`
    - `cairn rescore quickstart@0:9 --reward rewards.py:grade --write rewards.parquet`
    - `cairn rescore quickstart@39 --reward judge.py:grade --set reward.rm_timeout=60 --json | jq .overall`
    """
    from cairn.flows.cli.tables import reporting
    from cairn.flows.rescore.rescoring import CannotRescore, naming
    from cairn.flows.rescore.rescoring import rescore as rescored

    run, at, iterations = place.partition("@")
    if write is not None:
        require_free(write)
    ledger = open_ledger(store, run)
    with reporting() as tell:
        try:
            named = [] if reward is None else [naming(reward)]
            found, rows = rescored(ledger, iterations if at else None, [*named, *(overrides or [])], tell)
        except CannotRescore as error:
            raise BadInput(str(error)) from None
    if write is not None:
        write_new(rows, write)
    if json:
        print_json(found.model_dump(mode="json"))
    else:
        _print(found)


def _print(found: "Rescored") -> None:
    from cairn.flows.cli.tables import print_table
    from cairn.flows.rescore.rescored import HEADER

    print_table(HEADER, found.lines())
    for sentence in found.sentences():
        say(sentence)
    say(found.conclusion())
