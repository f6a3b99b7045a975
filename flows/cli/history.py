"""Commands that use a run's history: rescore, whatif, fork, replay, diff."""

import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.flows.cli.app import FAILED, BadInput, JsonOption, RunArgument, StoreOption, writing
from cairn.flows.cli.printing import print_json, say, tell
from cairn.flows.cli.reading import open_ledger
from cairn.flows.cli.training import SetOption
from cairn.storage.ledger.layout import LAST_NUMBER

if TYPE_CHECKING:
    import pyarrow as pa

    from cairn.flows.events import Event
    from cairn.flows.history.diff import Parting
    from cairn.flows.history.replay import Replayed, Weights
    from cairn.flows.history.rescore import Rescored
    from cairn.flows.history.whatif import WhatIf


# The file that `--write` requests in addition to the printed result.


def require_free(file: Path) -> None:
    """Raise BadInput unless a new file can be written at the path."""
    if file.exists():
        raise BadInput(f"{file} exists already: use another name")
    if not file.parent.is_dir():
        raise BadInput(f"{file} cannot be written: there is no folder {file.parent}")
    if not os.access(file.parent, os.W_OK):
        raise BadInput(f"{file} cannot be written: the folder {file.parent} is not writable")


def write_new(rows: "pa.Table", file: Path) -> None:
    """Write a table atomically. Raises BadInput where a file exists by now, or the path cannot be written."""
    from cairn.storage.ledger.snapshots import to_parquet

    with writing(file), tempfile.TemporaryDirectory(prefix=f".{file.name}-", dir=file.parent) as room:
        whole = Path(room) / file.name
        whole.write_bytes(to_parquet(rows))
        try:
            os.link(whole, file)  # unlike a renaming, over nothing
        except FileExistsError:
            require_free(file)


# `cairn rescore`: the rewards of a run under another grader.


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
        typer.Option("--write", metavar="FILE", help="Write the rewards of each sample into this new Parquet file."),
    ] = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Grade the samples of a run again, with another grader or today's code of its own, and show what changes.

    Nothing is sampled or trained: the command shows the rewards that the same responses would have had. The run is not
    changed, and may be running. A response whose generation failed stays failed.

    Examples:

    - `cairn rescore quickstart` by the run's own grader, as its code is today
    - `cairn rescore quickstart --reward gsm8k`
    - `cairn rescore quickstart@0:9 --reward rewards.py:grade --write rewards.parquet`
    - `cairn rescore quickstart@39 --reward judge.py:grade --set reward.rm_timeout=60 --json | jq .overall`
    """
    from cairn.flows.cli.tables import reporting
    from cairn.flows.history.rescore import CannotRescore, naming
    from cairn.flows.history.rescore import rescore as rescored

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
        _print_rescored(found)


def _print_rescored(found: "Rescored") -> None:
    from cairn.flows.cli.tables import print_table
    from cairn.flows.history.rescore import HEADER

    print_table(HEADER, found.lines())
    for sentence in found.sentences():
        say(sentence)
    say(found.conclusion())


# `cairn whatif`: the advantages of an iteration under another algorithm.


_ITERATION_PLACE = re.compile(r"(?P<run>.+)@(?P<iteration>\d{1,6})")


def whatif(
    place: Annotated[str, typer.Argument(metavar="RUN@ITER", help="An iteration whose advantages are committed.")],
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
        typer.Option("--write", metavar="FILE", help="Write the advantages into this new Parquet file."),
    ] = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Show which advantages another algorithm would have given to the samples that an iteration trained on.

    Nothing is sampled, scored or trained: rewards and log-probs come from the iteration's snapshots. The run is not
    changed, and may be running. The command refuses an algorithm that needs scores which the iteration does not have.

    In the output |A| is the mean absolute advantage of a group's trained tokens. A sign flip is a token that the update
    encouraged and the other algorithm would have discouraged, or the reverse.

    Examples:

    - `cairn whatif quickstart@39 --set algorithm.advantage_estimator=rloo`
    - `cairn whatif quickstart@39 --set algorithm.grpo_std_normalization=false --group 1250`
    - `cairn whatif quickstart@39 --set algorithm.normalize_advantages=true --write advantages.parquet`
    - `cairn whatif quickstart@39 --set algorithm.advantage_estimator=rloo --json | jq .overall`
    """
    from cairn.flows.history.whatif import CannotTell, what_if

    at = _ITERATION_PLACE.fullmatch(place)
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
        _print_whatif(found, group, limit)


def _print_whatif(found: "WhatIf", group: int | None, limit: int) -> None:
    from cairn.flows.cli.tables import print_table
    from cairn.flows.history.whatif import HEADER, SAMPLE_HEADER

    if group is not None:
        print_table(SAMPLE_HEADER, (sample.line() for sample in found.samples if sample.group_id == group))
    else:
        shown = list(found.groups.items())[:limit]
        print_table(HEADER, [*(one.line(str(name)) for name, one in shown), found.overall.line("all")])
        if len(shown) < len(found.groups):
            say(f"{len(found.groups) - len(shown)} more groups: --limit {len(found.groups)} shows all")
    for name, change in found.metrics.items():
        say(f"{name}: {_number(change.before)} → {_number(change.after)}")
    say(found.conclusion())


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


_PLACE = re.compile(r"(?P<run>.+)@(?P<iteration>\d+)")


def fork(
    origin: Annotated[
        str, typer.Argument(metavar="RUN@ITER", help="A run, and the last iteration that the new one shares with it.")
    ],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Name of the new run.")],
    overrides: SetOption = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Create a run that shares another run's iterations up to ITER and continues with other options.

    Nothing is copied: the new run reads the shared iterations where they are stored. The other run is not changed, and
    may be running. The new run starts with the weights, optimizer, data cursor and buffer after iteration ITER.

    Examples:

    - `cairn fork quickstart@19 warmer --set rollout.rollout_temperature=1.2` then `cairn resume warmer`
    - `cairn fork quickstart@39 longer --set rollout.num_rollout=80`
    """
    from cairn.flows.history.diff import differing_options
    from cairn.flows.history.fork import CannotFork
    from cairn.flows.history.fork import fork as forked

    place = _PLACE.fullmatch(origin)
    if place is None:
        raise BadInput(f"{origin!r} is not RUN@ITER, such as quickstart@19")
    parent = open_ledger(store, place["run"])
    iteration = int(place["iteration"])
    try:
        created = forked(parent, iteration, new, overrides or [])
    except (CannotFork, ValueError) as error:
        raise BadInput(str(error)) from None
    changed = differing_options(parent, created)
    if json:
        options = {name: {"parent": old, "fork": given} for name, old, given in changed}
        print_json({"run": new, "parent": {"run": parent.run, "iteration": iteration}, "options": options})
        return
    last = created.manifest.config["rollout"]["num_rollout"] - 1  # type: ignore[index, call-overload, operator]
    say(f"run {new} shares iterations 0 to {iteration} with {parent.run} and computes {iteration + 1} to {last} itself")
    for name, old, given in changed:
        say(f"  {name}: {old} → {given}")
    say(f"continue with: cairn resume {new}" + ("" if store == "." else f" --store {store}"))


def replay(
    run: RunArgument,
    iteration: Annotated[
        int | None,
        typer.Argument(metavar="[ITER]", min=0, max=LAST_NUMBER, help="Number of the iteration, from 0."),
    ] = None,
    step: Annotated[
        str | None,
        typer.Argument(metavar="[STEP]", help="rollout, reward, filter, …, or one shard of a step: reward.00-000."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every step of every iteration.")] = False,
    kind: Annotated[
        str | None, typer.Option("--step", metavar="KIND", help="With --all: only steps of this kind.")
    ] = None,
    weights: Annotated[
        bool,
        typer.Option("--weights", help="Every update, from the committed batches: compares the final weights."),
    ] = False,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Repeat committed steps outside the ledger, and compare the results bit for bit. Exits with 1 if anything differs.

    Nothing is written into the ledger, and a live driver of the run is not disturbed: if the steps need engines, the
    command starts its own. It names steps whose inputs are retired or redacted; these do not count as a difference.

    Examples:

    - `cairn replay quickstart 12 train` restores the weights before iteration 12 and does its update again
    - `cairn replay quickstart 12 reward.00-000 --json`
    - `cairn replay quickstart --all` does the whole run again
    - `cairn replay quickstart --all --step reward` grades every sample again
    - `cairn replay quickstart --weights` does every update again, from the initial weights on
    """
    from cairn.flows.history.replay import UPDATES, NothingToReplay, Replayed, newest_update, replay_all, weights_again
    from cairn.flows.history.replay import replay as replayed
    from cairn.storage.ledger.commits import Step
    from cairn.tasks.durable.events import Message

    def on_event(event: "Event") -> None:
        if isinstance(event, Message):
            tell(event.text)

    def tell_result(again: Replayed) -> None:
        if not json:
            _say_replayed(again)

    again_made: Weights | None = None
    if weights:
        if everything or kind is not None or iteration is not None or step is not None:
            raise BadInput("--weights repeats every update of the run: leave out ITER, STEP, --all and --step")
        ledger = open_ledger(store, run)
        try:
            newest = newest_update(ledger)
        except NothingToReplay as error:
            raise BadInput(str(error)) from None
        found = replay_all(ledger, UPDATES, tell_result, on_event)
        again_made = weights_again(newest, found)
    elif everything:
        if iteration is not None or step is not None:
            raise BadInput(
                "--all repeats every iteration: leave out ITER and STEP; --step KIND selects one kind of step"
            )
        steps = list(Step) if kind is None else [Step(_known_step(kind))]
        found = replay_all(open_ledger(store, run), steps, tell_result, on_event)
    elif iteration is None or step is None or kind is not None:
        raise BadInput("set ITER and STEP, such as 12 train, or use --weights, --all, or --all --step KIND")
    else:
        name, _, shard = step.partition(".")
        try:
            found = replayed(open_ledger(store, run), iteration, Step(_known_step(name)), shard or None, on_event)
        except NothingToReplay as error:
            raise BadInput(str(error)) from None
        for again in found:
            tell_result(again)
    differ, skipped = sum(bool(one.differences) for one in found), sum(one.skipped is not None for one in found)
    if json and (everything or weights):
        made = {} if again_made is None else {"weights": again_made.model_dump(mode="json")}
        counts = {"equal": len(found) - differ - skipped, "differ": differ, "skipped": skipped}
        print_json({"run": run, **counts, **made, "steps": [one.model_dump(mode="json") for one in found]})
    elif json:
        print_json([one.model_dump(mode="json") for one in found])
    elif everything:
        equal = len(found) - differ - skipped
        say(f"run {run}: {equal} steps are equal, bit for bit; {differ} differ, {skipped} cannot be repeated")
    elif again_made is not None:
        _say_weights(run, again_made)
    if differ:
        raise typer.Exit(FAILED)


def _say_weights(run: str, again: "Weights") -> None:
    weights = f"run {run}: the weights after iteration {again.iteration}"
    if again.differs_at is not None:
        verdict = f"differ: {again.differs_at} is the first step with another result"
    elif again.same:
        verdict = f"are the same: version {again.weight_version}, state {again.state_digest}"
    else:
        verdict = "cannot be computed again"
    gone = f"; {count} update{'s' * (count > 1)} cannot be repeated" if (count := again.not_done_again) else ""
    say(f"{weights} {verdict}{gone}")


def _known_step(name: str) -> str:
    from cairn.storage.ledger.commits import Step

    if name not in list(Step):
        raise BadInput(f"{name!r} is not a step; steps are {', '.join(Step)}")
    return name


def _say_replayed(again: "Replayed") -> None:
    verdict = "differs" if again.differences else f"not repeated: {again.skipped}" if again.skipped else None
    say(f"{again.name}: {verdict or 'equal, bit for bit'}")
    for sentence in again.differences:
        say(f"  {sentence}")
    for sentence in again.environment if again.differences else ():
        say(f"  environment: {sentence}")


def diff(
    ours: Annotated[str, typer.Argument(metavar="A", help="A run.")],
    theirs: Annotated[str, typer.Argument(metavar="B", help="Another run of the same store.")],
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Name the first step at which two runs differ, and what differs there. Exits with 1 if they differ.

    Only the results of steps are compared: samples, rewards, weights. Time, place and speed are not. If a needed table
    is no longer stored, the command names it and compares what follows.

    Examples:

    - `cairn diff quickstart warmer`
    - `cairn diff before after --json | jq -r .parts_at`
    """
    from cairn.flows.history.diff import diff as compared

    found = compared(open_ledger(store, ours), open_ledger(store, theirs))
    if json:
        print_json(found.model_dump(mode="json"))
    else:
        _print_parting(ours, theirs, found)
    if found.parts_at is not None:
        raise typer.Exit(FAILED)


def _print_parting(ours: str, theirs: str, found: "Parting") -> None:
    for name, one, other in found.options:
        say(f"  {name}: {one} in {ours}, {other} in {theirs}")
    equal = f"{found.compared} commits are equal" + (f", {found.shared} of them shared" if found.shared else "")
    for sentence in found.retired:
        say(f"  {sentence}")
    if found.parts_at is not None:
        say(f"{ours} and {theirs} first differ at {found.parts_at}; before it {equal}")
        for sentence in found.how:
            say(f"  {sentence}")
    elif found.ended is not None:
        say(f"{ours} and {theirs} are equal up to the end of {found.ended}: {equal}")
    else:
        say(f"{ours} and {theirs} are equal{' in everything that is stored' if found.retired else ''}: {equal}")
