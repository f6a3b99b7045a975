"""The command for one sample's code: episode."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.flows.cli.app import FAILED, BadInput, JsonOption, RunArgument, StoreOption, print_json, say, tell
from cairn.flows.cli.reading import open_ledger
from cairn.storage.layout import LAST_NUMBER

if TYPE_CHECKING:
    from collections.abc import Callable

    from cairn.engines.episodes.records import CallRecord
    from cairn.flows.reading.samples import SampleView
    from cairn.storage.ledger import Ledger

_PLACE = re.compile(r"(\d+)(?:/(\d+))?")


def episode(
    run: RunArgument,
    iteration: Annotated[
        int, typer.Argument(metavar="ITER", min=0, max=LAST_NUMBER, help="Number of the iteration, from 0.")
    ],
    sample: Annotated[
        str, typer.Argument(metavar="SAMPLE", help="Its number, as `cairn show` has it, or GROUP/INDEX.")
    ],
    replay: Annotated[
        bool, typer.Option("--replay", help="Run the sample's code again, from what it was given then.")
    ] = False,
    debugger: Annotated[
        bool,
        typer.Option("--debugger", "--pdb", help="With --replay: stop at the first line of the code, and at an error."),
    ] = False,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Show one sample turn by turn, or run its code again from the record, offline: no engine starts, and no tool,
    grader or clock is asked; what the code did past its context it does again.

    With `--replay` every answer is printed as the code is given it, and at last whether the trajectory is the committed
    one, bit for bit, or where it first differs; then the exit code is 1. The code may have been changed since: that is
    told. It has to lie where a store may name code, in the folder you stand in or on PYTHONPATH.

    Examples:

    - `cairn episode agent 3 17` shows what `cairn show agent 3 --sample 17` does
    - `cairn episode agent 3 12/1 --replay`
    - `cairn episode agent 3 17 --replay --debugger`
    """
    if debugger and not replay:
        raise BadInput("--debugger is of --replay: give both")
    if debugger and json:
        raise BadInput("a debugger prints no JSON: leave out --json")
    ledger = open_ledger(store, run)
    view, total = _sample(ledger, iteration, sample)
    if replay:
        _replay(ledger, view, debugger, json)
        return
    from cairn.flows.reading.samples import with_episodes

    (view,) = with_episodes(ledger, [view])
    if json:
        print_json(view.model_dump(mode="json"))
    else:
        from cairn.flows.cli.tables import print_samples

        print_samples([view], total, alone=True)


def _sample(ledger: "Ledger", iteration: int, place: str) -> tuple["SampleView", int]:
    """The sample at a place, and how many the iteration has. Raises BadInput."""
    from cairn.flows.reading.samples import iteration_samples

    match = _PLACE.fullmatch(place)
    if match is None:
        raise BadInput(f"{place!r} is no sample: give its number, such as 17, or its group and index, such as 12/1")
    try:
        found = iteration_samples(ledger, iteration)
    except LookupError as error:
        raise BadInput(str(error)) from None
    first, index = int(match[1]), match[2]
    if index is None:
        if first >= len(found):
            raise BadInput(f"iteration {iteration} of run {ledger.run!r} has samples 0 to {len(found) - 1}, no {first}")
        return found[first], len(found)
    for view in found:
        if (view.group_id, view.sample_index) == (first, int(index)):
            return view, len(found)
    raise BadInput(f"iteration {iteration} of run {ledger.run!r} has no sample {index} of group {first}")


def _replay(ledger: "Ledger", view: "SampleView", debugger: bool, json: bool) -> None:
    from bdb import BdbQuit

    from cairn.flows.replay_episode import NotReplayable, replay_episode

    try:
        found = replay_episode(
            ledger,
            view.iteration,
            view.shard,
            (view.group_id, view.sample_index),
            given=(lambda record: None) if json else _printer(ledger),
            debugger=debugger,
        )
    except NotReplayable as error:
        raise BadInput(str(error)) from None
    except BdbQuit:
        tell("left the debugger")
        raise typer.Exit(FAILED) from None
    if json:
        print_json(found.model_dump(mode="json"))
    else:
        if found.changed:
            tell("the source of the function or of its tools is not the run's: it was changed since")
        say(
            {
                "same": f"the same trajectory, bit for bit, after {found.answers} answers",
                "differs": f"another trajectory: {found.told}",
                "failed": f"no trajectory: {found.told}",
                "diverged": f"no trajectory: {found.told}",
            }[found.outcome]
        )
    if found.outcome != "same":
        raise typer.Exit(FAILED)


def _printer(ledger: "Ledger") -> "Callable[[CallRecord], None]":
    """Prints answers one after the other."""
    from cairn.flows.cli.episode_lines import record_lines
    from cairn.flows.cli.tables import console
    from cairn.flows.reading.episodes import run_texts

    out, texts, began = console(), run_texts(ledger), list[float]()

    def printed(record: "CallRecord") -> None:
        began.append(record.started_at)
        for line in record_lines(record, began[0], texts):
            out.print(line, soft_wrap=True)

    return printed
