"""Commands that use a run's history: rescore, whatif, fork, replay, diff, compare."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from cairn.configs.errors import BadInput
from cairn.flows.cli.command import IterationArgument, JsonOption, Root, Shown, bad_input, writing
from cairn.flows.cli.printing import print_message, print_parts, print_warning
from cairn.flows.cli.tables import grid, numbers, reporting
from cairn.flows.cli.training import SetOption
from cairn.flows.reading.address import Address, iteration_of, newest, parser

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import RenderableType

    from cairn.flows.history.diff import Parting
    from cairn.flows.history.replay import Replayed, Weights
    from cairn.flows.history.whatif import WhatIf
    from cairn.storage.ledger.commits import Step


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

    with writing(file), tempfile.TemporaryDirectory(prefix=f".{file.name}-", dir=file.parent) as folder:
        whole = Path(folder) / file.name
        whole.write_bytes(to_parquet(rows))
        try:
            os.link(whole, file)  # unlike a rename, replaces no file
        except FileExistsError:
            require_free(file)


def rescore(
    root: Root,
    place: Annotated[
        str, Argument(metavar="RUN[@ITER|@A:B]", help="A run, one iteration of it, or those from A to B.")
    ],
    overrides: Annotated[
        list[str] | None,
        Option("--set", metavar="reward.OPTION=VALUE", help="Change one option of the grader; may be repeated."),
    ] = None,
    reward: Annotated[
        str | None, Option("--reward", metavar="NAME|PATH", help="Another grader: one of Cairn's by name, or your own.")
    ] = None,
    write: Annotated[
        Path | None,
        Option("--write", metavar="FILE", help="Write the rewards of each sample into this new Parquet file."),
    ] = None,
) -> Shown:
    """Grade the samples of a run again, and compare.

    The grader is another one, or the run's own as its code is today. Nothing is sampled or trained: the command shows
    the rewards that the same responses would have had. The run is not changed, and may be running. A response whose
    generation failed stays failed.

    Examples:

    - `cairn rescore quickstart` by the run's own grader, as its code is today
    - `cairn rescore quickstart --reward gsm8k`
    - `cairn rescore quickstart@0:9 --reward rewards.py:grade --write rewards.parquet`
    - `cairn rescore quickstart@39 --reward judge.py:grade --set reward.rm_timeout=60 --json | jq .overall`
    """
    from cairn.flows.history.rescore import HEADER, grader_override
    from cairn.flows.history.rescore import rescore as rescored

    run, at, iterations = place.partition("@")
    if write is not None:
        require_free(write)
    ledger = root.ledger(run)
    with reporting() as progress:
        named = [] if reward is None else [grader_override(reward)]
        found, rows = rescored(ledger, iterations if at else None, [*named, *(overrides or [])], progress)
    if write is not None:
        write_new(rows, write)
    return Shown(found, [numbers(HEADER, found.lines()), *found.sentences(), found.conclusion()])


def whatif(
    root: Root,
    place: IterationArgument,
    overrides: Annotated[
        list[str] | None, Option("--set", metavar="algorithm.OPTION=VALUE", help="Change one option; may be repeated.")
    ] = None,
    group: Annotated[
        int | None, Option("--group", metavar="ID", help="Show the samples of one group instead of all groups.")
    ] = None,
    limit: Annotated[int, Option("--limit", metavar="N", min=1, help="At most N groups.")] = 16,
    write: Annotated[
        Path | None, Option("--write", metavar="FILE", help="Write the advantages into this new Parquet file.")
    ] = None,
) -> Shown:
    """Show the advantages of an iteration by another algorithm.

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
    from cairn.flows.history.whatif import what_if
    from cairn.storage.ledger.commits import Step

    if write is not None:
        require_free(write)
    ledger = root.ledger(place.run)
    found, rows = what_if(ledger, iteration_of(ledger, place, newest(Step.ADVANTAGE)), overrides or [])
    if group is not None and group not in found.groups:
        raise BadInput(f"iteration {found.iteration} of run {found.run} did not train on group {group}")
    if write is not None:
        write_new(rows, write)
    return Shown(found, _advantages(found, group, limit))


def _advantages(found: "WhatIf", group: int | None, limit: int) -> "Iterator[RenderableType]":
    from cairn.flows.history.whatif import HEADER, SAMPLE_HEADER

    if group is not None:
        yield numbers(SAMPLE_HEADER, (sample.line() for sample in found.samples if sample.group_id == group))
    else:
        shown = list(found.groups.items())[:limit]
        yield numbers(HEADER, [*(one.line(str(name)) for name, one in shown), found.overall.line("all")])
        if len(shown) < len(found.groups):
            yield f"{len(found.groups) - len(shown)} more groups: --limit {len(found.groups)} shows all"
    yield from found.notes
    for name, change in found.metrics.items():
        yield f"{name}: {_number(change.before)} → {_number(change.after)}"
    yield found.conclusion()


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def fork(
    root: Root,
    origin: IterationArgument,
    new: Annotated[str, Argument(metavar="NEW", help="Name of the new run.")],
    overrides: SetOption = None,
) -> Shown:
    """Create a run that continues an iteration of another run.

    The new run has the other's iterations up to ITER, and may have other options. Nothing is copied: the new run reads
    the shared iterations where they are stored. The other run is not changed, and may be running. The new run starts
    with the weights, optimizer, data cursor and buffer after iteration ITER.

    Examples:

    - `cairn fork quickstart@19 warmer --set rollout.rollout_temperature=1.2` then `cairn resume warmer`
    - `cairn fork quickstart@39 longer --set rollout.num_rollout=80`
    """
    from cairn.flows.history.diff import differing_inputs, differing_options
    from cairn.flows.history.fork import fork as forked
    from cairn.storage.ledger.commits import Step

    parent = root.ledger(origin.run)
    iteration = iteration_of(parent, origin, newest(Step.TRAIN))
    with bad_input(ValueError):
        created = forked(parent, iteration, new, overrides or [], note=print_warning)
    changed, inputs = differing_options(parent, created), differing_inputs(parent, created)
    options = {name: {"parent": old, "fork": new_value} for name, old, new_value in changed}
    last = created.manifest.config["rollout"]["num_rollout"] - 1  # type: ignore[index, call-overload, operator]
    text = [
        f"run {new} shares iterations 0 to {iteration} with {parent.run} and computes {iteration + 1} to {last} itself",
        *(f"  {name}: {old} → {new_value}" for name, old, new_value in changed),
        *(f"  {input}" for input in inputs),
        f"continue with: cairn resume {new}" + ("" if root.url == "." else f" --store {root.url}"),
    ]
    origin_of = {"run": parent.run, "iteration": iteration}
    return Shown({"run": new, "parent": origin_of, "options": options, "inputs": inputs}, text)


def replay(
    root: Root,
    place: IterationArgument,
    step: Annotated[
        str | None,
        Argument(metavar="[STEP]", help="rollout, reward, filter, …, or one shard of a step: reward.00-000."),
    ] = None,
    everything: Annotated[bool, Option("--all", help="Every step of every iteration.")] = False,
    kind: Annotated[str | None, Option("--step", metavar="KIND", help="With --all: only steps of this kind.")] = None,
    weights: Annotated[
        bool, Option("--weights", help="Every update, from the committed batches: compares the final weights.")
    ] = False,
    json: JsonOption = False,
) -> Shown:
    """Repeat committed steps, and compare bit for bit.

    Exits with 1 if anything differs. Nothing is written into the ledger, and a live driver of the run is not disturbed:
    if the steps need engines, the command starts its own. It names steps whose inputs are retired or redacted; these do
    not count as a difference.

    Examples:

    - `cairn replay quickstart@12 train` restores the weights before iteration 12 and does its update again
    - `cairn replay quickstart@12 reward.00-000 --json`
    - `cairn replay quickstart --all` does the whole run again
    - `cairn replay quickstart --all --step reward` grades every sample again
    - `cairn replay quickstart --weights` does every update again, from the initial weights on
    """
    from cairn.flows.history.replay import UPDATES, newest_update, replay_all, replayed_weights
    from cairn.flows.history.replay import replay as replayed
    from cairn.storage.ledger.commits import Step

    def show(step: "Replayed") -> None:
        if not json:
            print_parts(_replayed(step))

    run, iteration = place.run, place.iteration
    text: list[str] = []
    conclusions: dict[str, Weights] = {}
    if weights:
        if everything or kind is not None or iteration is not None or step is not None:
            raise BadInput("--weights repeats every update of the run: leave out ITER, STEP, --all and --step")
        ledger = root.ledger(run)
        last = newest_update(ledger)
        found = replay_all(ledger, UPDATES, show, print_message)
        conclusions["weights"] = replayed_weights(last, found)
        text.append(_weights(run, conclusions["weights"]))
    elif everything:
        if iteration is not None or step is not None:
            raise BadInput(
                "--all repeats every iteration: leave out ITER and STEP; --step KIND selects one kind of step"
            )
        steps = list(Step) if kind is None else [_known_step(kind)]
        found = replay_all(root.ledger(run), steps, show, print_message)
    elif step is None or kind is not None:
        raise BadInput(f"name a STEP, as in `cairn replay {run} train`, or use --weights, --all, or --all --step KIND")
    else:
        name, _, shard = step.partition(".")
        which, ledger = _known_step(name), root.ledger(run)
        found = replayed(ledger, iteration_of(ledger, place, newest(which)), which, shard or None, print_message)
        for one in found:
            show(one)
    differ, skipped = sum(bool(one.differences) for one in found), sum(one.skipped is not None for one in found)
    equal = len(found) - differ - skipped
    if everything:
        text.append(f"run {run}: {equal} steps are equal, bit for bit; {differ} differ, {skipped} cannot be repeated")
    whole = {"run": run, "equal": equal, "differ": differ, "skipped": skipped, **conclusions, "steps": found}
    return Shown(whole if everything or weights else found, text, failed=differ > 0)


def _weights(run: str, replayed: "Weights") -> str:
    weights = f"run {run}: the weights after iteration {replayed.iteration}"
    if replayed.differs_at is not None:
        verdict = f"differ: {replayed.differs_at} is the first step with another result"
    elif replayed.same:
        verdict = f"are the same: version {replayed.weight_version}, state {replayed.state_digest}"
    else:
        verdict = "cannot be computed again"
    rest = f"; {count} update{'s' * (count > 1)} cannot be repeated" if (count := replayed.not_done_again) else ""
    return f"{weights} {verdict}{rest}"


def _known_step(name: str) -> "Step":
    from cairn.storage.ledger.commits import Step

    if name not in list(Step):
        raise BadInput(f"{name!r} is not a step; steps are {', '.join(Step)}")
    return Step(name)


def _replayed(step: "Replayed") -> Iterator[str]:
    verdict = "differs" if step.differences else f"not repeated: {step.skipped}" if step.skipped else None
    yield f"{step.name}: {verdict or 'equal, bit for bit'}"
    for sentence in step.differences:
        yield f"  {sentence}"
    for sentence in step.environment if step.differences else ():
        yield f"  environment: {sentence}"


def compare(
    root: Root,
    first: Annotated[
        Address,
        Argument(metavar="A[@ITER]", help="A run, or up to one of its iterations.", parser=parser("RUN[@ITER]")),
    ],
    second: Annotated[
        Address,
        Argument(
            metavar="B[@ITER]",
            help="Another run of the same store, or another iteration of the same run.",
            parser=parser("RUN[@ITER]"),
        ),
    ],
    page: Annotated[
        Path | None, Option("--page", metavar="FILE", help="Write it as one HTML page too, with both runs' curves.")
    ] = None,
) -> Shown:
    """Compare two runs: options, code, curves, samples and costs.

    Shown are options, code and data, curves, evaluations, the first sample that differs, time and tokens. The metrics
    are those of the last iteration that both have, or of the iterations that you name. `cairn diff` tells by its exit
    code whether two runs are equal, bit for bit.

    Examples:

    - `cairn compare quickstart warmer --page both.html`
    - `cairn compare quickstart@9 quickstart@39`
    - `cairn compare quickstart warmer --json | jq .parting.inputs`
    """
    from cairn.flows.report.compare import compare as compared
    from cairn.flows.report.compare import shown, write_comparison

    if page is not None and not page.absolute().parent.is_dir():
        raise BadInput(f"{page} cannot be written: there is no folder {page.absolute().parent}")
    ledgers, untils = (root.ledger(first.run), root.ledger(second.run)), (first.iteration, second.iteration)
    for ledger, until in zip(ledgers, untils, strict=True):
        last = ledger.last_iteration()
        if until is not None and (last is None or until > last):
            has = "none yet" if last is None else f"0 to {last}"
            raise BadInput(f"run {ledger.run!r} has no iteration {until}; it has {has}")
    with reporting() as progress:
        found, histories = compared(*ledgers, *untils, lambda what, done, of: progress(what))
    text: list[RenderableType] = [found.paragraph, ""]
    lines = [(pair.name, shown(pair.first), shown(pair.second), shown(pair.change), pair.unit) for pair in found.pairs]
    values = grid("", *found.names, "change", "unit", right=(*found.names, "change"))
    for line in lines:
        values.add_row(*line)
    text.append(values)
    if page is not None:
        with writing(page):
            write_comparison(found, histories, root.store, page)
        text.append(f"{page}: both runs' curves")
    return Shown({**found.model_dump(mode="json"), "paragraph": found.paragraph}, text)


def diff(
    root: Root,
    first: Annotated[str, Argument(metavar="A", help="A run.")],
    second: Annotated[str, Argument(metavar="B", help="Another run of the same store.")],
) -> Shown:
    """Show the first step at which two runs differ.

    Exits with 1 if they differ. Only the results of steps are compared: samples, rewards, weights. Time, place and
    speed are not. If a needed table is no longer stored, the command names it and compares what follows. `cairn
    compare` shows how both runs went.

    Examples:

    - `cairn diff quickstart warmer`
    - `cairn diff before after --json | jq -r .parts_at`
    """
    from cairn.flows.history.diff import diff as compared

    found = compared(root.ledger(first), root.ledger(second))
    return Shown(found, _parting(first, second, found), failed=found.parts_at is not None)


def _parting(first: str, second: str, found: "Parting") -> Iterator[str]:
    for name, one, other in found.options:
        yield f"  {name}: {one} in {first}, {other} in {second}"
    for input in found.inputs:
        yield f"  {input}"
    equal = f"{found.compared} commits are equal" + (f", {found.shared} of them shared" if found.shared else "")
    for sentence in found.retired:
        yield f"  {sentence}"
    if found.parts_at is not None:
        yield f"{first} and {second} first differ at {found.parts_at}; before it {equal}"
        for sentence in found.how:
            yield f"  {sentence}"
    elif found.ended is not None:
        yield f"{first} and {second} are equal up to the end of {found.ended}: {equal}"
    else:
        yield f"{first} and {second} are equal{' in everything that is stored' if found.retired else ''}: {equal}"
