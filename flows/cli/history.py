"""Commands that travel in a run's history: fork, replay, diff."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.flows.cli.app import FAILED, BadInput, JsonOption, RunArgument, StoreOption, print_json, say, tell
from cairn.flows.cli.reading import open_ledger
from cairn.flows.cli.training import SetOption
from cairn.storage.layout import LAST_NUMBER

if TYPE_CHECKING:
    from cairn.flows.events import Event
    from cairn.flows.reading.diff import Parting
    from cairn.flows.replay import Replayed, Weights

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
    """Make a run that shares another's iterations up to ITER and goes on with other options.

    Copies nothing: the shared iterations are read where they lie. The other run is left as it is, and may be running.
    Weights, optimizer, data cursor and buffer are those that iteration ITER left.

    Examples:

    - `cairn fork quickstart@19 warmer --set rollout.rollout_temperature=1.2` then `cairn resume warmer`
    - `cairn fork quickstart@39 longer --set rollout.num_rollout=80`
    """
    from cairn.flows.fork import CannotFork
    from cairn.flows.fork import fork as forked
    from cairn.flows.reading.diff import differing_options

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
    say(f"run {new} shares iterations 0 to {iteration} with {parent.run} and makes {iteration + 1} to {last} itself")
    for name, old, given in changed:
        say(f"  {name}: {old} → {given}")
    say(f"go on with: cairn resume {new}" + ("" if store == "." else f" --store {store}"))


def replay(
    run: RunArgument,
    iteration: Annotated[
        int | None,
        typer.Argument(metavar="[ITER]", min=0, max=LAST_NUMBER, help="Number of the iteration, from 0."),
    ] = None,
    step: Annotated[
        str | None,
        typer.Argument(metavar="[STEP]", help="rollout, reward, filter, …, or one shard of it: reward.00-000."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every step of every iteration.")] = False,
    kind: Annotated[
        str | None, typer.Option("--step", metavar="KIND", help="With --all: only steps of this kind.")
    ] = None,
    weights: Annotated[
        bool,
        typer.Option(
            "--weights", help="Every update, from the committed batches: whether the weights come out the same."
        ),
    ] = False,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Do committed steps again, beside the ledger, and compare what they make bit for bit.

    Nothing is written into the ledger, and a live driver of the run is not disturbed: engines, where the steps need
    them, are started apart. Exits with 1 if anything differs. Steps whose inputs are retired or redacted are named, and
    are no difference.

    Examples:

    - `cairn replay quickstart 12 train` restores the weights before iteration 12 and does its update again
    - `cairn replay quickstart 12 reward.00-000 --json`
    - `cairn replay quickstart --all` does the whole run again
    - `cairn replay quickstart --all --step reward` grades every sample again
    - `cairn replay quickstart --weights` does every update again, from the initial weights on
    """
    from cairn.flows.replay import UPDATES, NothingToReplay, Replayed, newest_update, replay_all, weights_again
    from cairn.flows.replay import replay as replayed
    from cairn.storage.commits import Step
    from cairn.tasks.events import Message

    def on_event(event: "Event") -> None:
        if isinstance(event, Message):
            tell(event.text)

    def tell_result(again: Replayed) -> None:
        if not json:
            _say_replayed(again)

    again_made: Weights | None = None
    if weights:
        if everything or kind is not None or iteration is not None or step is not None:
            raise BadInput("--weights is every update of the run: leave ITER, STEP, --all and --step out")
        ledger = open_ledger(store, run)
        try:
            newest = newest_update(ledger)
        except NothingToReplay as error:
            raise BadInput(str(error)) from None
        found = replay_all(ledger, UPDATES, tell_result, on_event)
        again_made = weights_again(newest, found)
    elif everything:
        if iteration is not None or step is not None:
            raise BadInput("--all is every iteration: leave ITER and STEP out; --step KIND does the steps of one kind")
        steps = list(Step) if kind is None else [Step(_known_step(kind))]
        found = replay_all(open_ledger(store, run), steps, tell_result, on_event)
    elif iteration is None or step is None or kind is not None:
        raise BadInput("give ITER and STEP, such as 12 train, or --weights, or --all, which may have --step KIND")
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
        say(f"run {run}: {equal} steps are equal, bit for bit; {differ} differ, {skipped} cannot be done again")
    elif again_made is not None:
        _say_weights(run, again_made)
    if differ:
        raise typer.Exit(FAILED)


def _say_weights(run: str, again: "Weights") -> None:
    weights = f"run {run}: the weights after iteration {again.iteration}"
    if again.differs_at is not None:
        verdict = f"do not come out the same: {again.differs_at} is the first step that makes something else"
    elif again.same:
        verdict = f"come out the same: version {again.weight_version}, state {again.state_digest}"
    else:
        verdict = "cannot be made again"
    gone = f"; {count} update{'s' * (count > 1)} cannot be done again" if (count := again.not_done_again) else ""
    say(f"{weights} {verdict}{gone}")


def _known_step(name: str) -> str:
    from cairn.storage.commits import Step

    if name not in list(Step):
        raise BadInput(f"{name!r} is not a step; steps are {', '.join(Step)}")
    return name


def _say_replayed(again: "Replayed") -> None:
    verdict = "differs" if again.differences else f"not done again: {again.skipped}" if again.skipped else None
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
    """Name the first step at which two runs part, and what differs there; exits with 1 if they do.

    Only what steps made is compared: samples, rewards, weights. When, where and how fast they were made is not. Tables
    that a run does not keep any more are named where they would have to be read, and what follows is compared.

    Examples:

    - `cairn diff quickstart warmer`
    - `cairn diff before after --json | jq -r .parts_at`
    """
    from cairn.flows.reading.diff import diff as compared

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
        say(f"{ours} and {theirs} part at {found.parts_at}; before it {equal}")
        for sentence in found.how:
            say(f"  {sentence}")
    elif found.ended is not None:
        say(f"{ours} and {theirs} are equal as far as {found.ended} goes: {equal}")
    else:
        say(f"{ours} and {theirs} are equal{' in all that is kept' if found.retired else ''}: {equal}")
