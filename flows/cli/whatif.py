"""`cairn whatif`: what the advantages of an iteration would have been."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.flows.cli.app import BadInput, JsonOption, StoreOption, print_json, say
from cairn.flows.cli.parquet import require_free, write_new
from cairn.flows.cli.reading import open_ledger

if TYPE_CHECKING:
    from cairn.flows.whatif.compared import WhatIf

_PLACE = re.compile(r"(?P<run>.+)@(?P<iteration>\d{1,6})")


def whatif(
    place: Annotated[str, typer.Argument(metavar="RUN@ITER", help="An iteration of a run that has its advantages.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="algorithm.OPTION=VALUE", help="Change one option; may be repeated."),
    ] = None,
    group: Annotated[
        int | None, typer.Option("--group", metavar="ID", help="Show the samples of one group instead of all groups.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="At most N groups.")] = 16,
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="FILE", help="A Parquet file, not there yet, for the advantages."),
    ] = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Say which advantages another algorithm would have given the samples that an iteration trained on.

    Nothing is sampled, scored or trained: rewards and log-probs are those of the iteration's snapshots. The run is left
    as it is, and may be running. An algorithm that needs scores which the iteration has not is refused.

    |A| is the mean absolute advantage of a group's trained tokens; a sign flip is a token that was encouraged and would
    not have been, or the other way round.

    Examples:

    - `cairn whatif quickstart@39 --set algorithm.advantage_estimator=rloo`
    - `cairn whatif quickstart@39 --set algorithm.grpo_std_normalization=false --group 1250`
    - `cairn whatif quickstart@39 --set algorithm.normalize_advantages=true --write advantages.parquet`
    - `cairn whatif quickstart@39 --set algorithm.advantage_estimator=rloo --json | jq .overall`
    """
    from cairn.flows.whatif.comparing import CannotTell, what_if

    at = _PLACE.fullmatch(place)
    if at is None:
        raise BadInput(f"{place!r} is not RUN@ITER, such as quickstart@39")
    if write is not None:
        require_free(write)
    ledger = open_ledger(store, at["run"])
    try:
        found, rows = what_if(ledger, int(at["iteration"]), overrides or [])
    except CannotTell as error:
        raise BadInput(str(error)) from None
    if group is not None and group not in found.groups:
        raise BadInput(f"iteration {found.iteration} of run {found.run} did not train on group {group}")
    if write is not None:
        write_new(rows, write)
    if json:
        print_json(found.model_dump(mode="json"))
    else:
        _print(found, group, limit)


def _print(found: "WhatIf", group: int | None, limit: int) -> None:
    from cairn.flows.cli.tables import print_table
    from cairn.flows.whatif.compared import HEADER, SAMPLE_HEADER

    if group is not None:
        print_table(SAMPLE_HEADER, (sample.line() for sample in found.samples if sample.group_id == group))
    else:
        shown = list(found.groups.items())[:limit]
        print_table(HEADER, [*(one.line(str(name)) for name, one in shown), found.overall.line("all")])
        if len(shown) < len(found.groups):
            say(f"{len(found.groups) - len(shown)} groups more: --limit {len(found.groups)} shows all")
    for name, change in found.metrics.items():
        say(f"{name}: {_number(change.before)} → {_number(change.after)}")
    say(found.conclusion())


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)
