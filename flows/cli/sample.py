"""`cairn episode` and `cairn lineage`: the course of one sample, its origin and its use."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from cairn.configs.errors import BadInput, Failure
from cairn.flows.cli.command import JsonOption, Root, SampleArgument, Shown, bad_input
from cairn.flows.cli.printing import print_parts, print_stderr
from cairn.flows.cli.tables import lines_of, piece_lines, sample_lines
from cairn.flows.reading.address import samples_of, the_sample
from cairn.flows.text import number

if TYPE_CHECKING:
    from collections.abc import Callable

    from cairn.engines.types.trajectories import CallRecord
    from cairn.flows.reading.lineage import CommitReference, Lineage, Token, Update
    from cairn.flows.reading.samples import SampleView
    from cairn.storage.ledger.ledger import Ledger


def episode(
    root: Root,
    place: SampleArgument,
    replay: Annotated[bool, Option("--replay", help="Run the sample's code again with the recorded answers.")] = False,
    debugger: Annotated[
        bool, Option("--debugger", "--pdb", help="With --replay: stop at the first line of the code, and at an error.")
    ] = False,
    json: JsonOption = False,
) -> Shown:
    """Show a sample turn by turn, or run its code again.

    A replay works offline: it starts no engine and calls no tool, grader or clock. Effects of the code that bypass its
    context happen again. With `--replay` the command prints every answer when the code receives it. At the end it says
    whether the trajectory equals the committed one, bit for bit, or where it first differs; then the exit code is 1. It
    also says whether the code has changed since. The code must be where a store may name code: in the current folder or
    on PYTHONPATH.

    Examples:

    - `cairn episode agent@3/17` shows what `cairn show agent@3/17` does
    - `cairn episode agent@3/12/1 --replay`
    - `cairn episode agent@3/17 --replay --debugger`
    """
    if debugger and not replay:
        raise BadInput("--debugger needs --replay: use both")
    if debugger and json:
        raise BadInput("--debugger cannot print JSON: leave out --json")
    from cairn.flows.reading.samples import with_episodes

    ledger = root.ledger(place.run)
    iteration, found = samples_of(ledger, place)
    view = the_sample(place, found, iteration)
    if replay:
        return _replay(ledger, view, debugger, json)
    (view,) = with_episodes(ledger, [view])
    return Shown(view, sample_lines([view], len(found), alone=True))


def _replay(ledger: "Ledger", view: "SampleView", debugger: bool, json: bool) -> Shown:
    from bdb import BdbQuit

    from cairn.flows.history.replay_episode import replay_episode

    try:
        found = replay_episode(
            ledger,
            view.iteration,
            view.shard,
            (view.group_id, view.sample_index),
            on_response=(lambda record: None) if json else _printer(ledger),
            debugger=debugger,
        )
    except BdbQuit:
        raise Failure("left the debugger") from None
    if found.changed and not json:
        print_stderr("the source of the function or of its tools has changed since the run")
    sentences = {
        "same": f"the same trajectory, bit for bit, after {found.answers} answers",
        "differs": f"another trajectory: {found.told}",
        "failed": f"no trajectory: {found.told}",
        "diverged": f"no trajectory: {found.told}",
    }
    return Shown(found, sentences[found.outcome], failed=found.outcome != "same")


def _printer(ledger: "Ledger") -> "Callable[[CallRecord], None]":
    """Return a function that prints answers one after the other."""
    from cairn.flows.reading.episodes import run_texts
    from cairn.flows.reading.pieces import record_piece

    texts, began = run_texts(ledger), list[float]()

    def printed(record: "CallRecord") -> None:
        began.append(record.started_at)
        print_parts(piece_lines(record_piece(record, began[0], texts)))

    return printed


_DIGITS = 12
"""Characters of a digest that are shown."""


def lineage(
    root: Root,
    place: SampleArgument,
    token: Annotated[int | None, Argument(metavar="[TOKEN]", min=0, help="Position in the response, from 0.")] = None,
) -> Shown:
    """Show where a sample came from and how it was used.

    This is the prompt's row, the weights that sampled it and their digest, the grader and its source, the update that
    consumed it, and the checkpoints and publications that include that update. With TOKEN the command also shows a
    token's log-prob, weight version, advantage, age and ratio. Every commit and table that it reads is checked against
    its digest.

    Examples:

    - `cairn lineage quickstart@5/17`
    - `cairn lineage quickstart@5/170/3` sample 3 of group 170, in the iteration that generated it or trained on it
    - `cairn lineage quickstart@5/170/3 12` says how token 12 came to be and was trained on
    - `cairn lineage quickstart@5/17 --json | jq .update.state_digest`
    """
    from cairn.flows.reading.lineage import lineage as lineage_of

    ledger = root.ledger(place.run)
    if place.iteration is not None and place.sample is not None and len(place.sample) == 2:
        iteration, (group, index) = place.iteration, place.sample
    else:
        iteration, views = samples_of(ledger, place)
        view = the_sample(place, views, iteration)
        group, index = view.group_id, view.sample_index
    with bad_input(LookupError):
        found = lineage_of(ledger, iteration, group, index, token)
    return Shown(found, lines_of(_facts(found), style="dim"))


def _facts(found: "Lineage") -> Iterator[tuple[str, str]]:
    prompt, sampled, grade, update = found.prompt, found.sampled, found.grade, found.update
    yield "sample", f"{found.sample_index} of group {found.group_id}, run {found.run}"
    yield "prompt", f"row {prompt.row} of {prompt.data} ({_short(prompt.data_digest)}), epoch {prompt.epoch}"
    yield "", _line(prompt.text)
    yield "label", _line(prompt.label if prompt.label is not None else "–")
    yield "response", f"{_line(sampled.response)}"
    log_prob = "" if sampled.log_prob is None else f" log-prob {sampled.log_prob:.4g},"
    yield "", f"{sampled.tokens} tokens,{log_prob} {sampled.finish_reason}, {sampled.status}"
    where = f"{sampled.engine} on {sampled.environment.host or sampled.environment.device}, seed {sampled.seed}"
    if sampled.weights:
        yield "sampled by", f"{where}; {_reference(sampled.made_by)}"
    else:
        yield "read by", _reference(sampled.made_by)
    for weights in sampled.weights:
        if weights.made_by is None:
            yield "weights", f"version {weights.version}, the initial ones ({_short(sampled.model_digest)})"
        else:
            digests = f"state {_short(weights.state_digest)}, published {_short(weights.published_digest)}"
            yield "weights", f"version {weights.version}, {digests}; {_reference(weights.made_by)}"
    if grade is None:
        yield "reward", "not graded"
    else:
        source = ", ".join(f"{name} {_short(digest)}" for name, digest in grade.sources.items())
        grader = f"{grade.grader}, version {grade.grader_version}{f' ({source})' if source else ''}"
        yield "reward", "–" if grade.reward is None else f"{grade.reward:g}"
        yield "graded by", f"{grader}; {_reference(grade.made_by)}"
        if grade.error:
            yield "error", _line(grade.error)
    for judged in found.judgements:
        reason = f" ({judged.reason})" if judged.reason else ""
        yield f"iteration {judged.iteration}", f"{judged.disposition}{reason}; {_reference(judged.made_by)}"
    yield from _use(found, update)
    if found.token is not None:
        yield f"token {found.token.position}", _token(found.token)


def _use(found: "Lineage", update: "Update | None") -> Iterator[tuple[str, str]]:
    if update is None:
        yield "trained on", "not by any update"
        return
    if update.estimated_by is not None:
        estimated_by = _reference(update.estimated_by)
        yield "advantage", f"{number(update.advantage, '.6g')}, age {number(update.age)}; {estimated_by}"
    versions = f"version {update.weight_version_in} → {update.weight_version_out}"
    yield (
        "trained on",
        f"{versions}, 1 of {update.samples} samples, loss {number(update.loss, '.6g')}; {_reference(update.made_by)}",
    )
    yield "left", f"state {_short(update.state_digest)}, published {_short(update.published_digest)}"
    stored = [str(saved.iteration) for saved in found.checkpoints if not saved.retired]
    retired = len(found.checkpoints) - len(stored)
    shown = ", ".join(stored if len(stored) < 8 else [*stored[:3], "…", *stored[-2:]]) or "none"
    more = f"; {retired} more are retired" if retired else ""
    yield "checkpoints", f"of iterations {shown}{more}" if stored else shown


def _token(token: "Token") -> str:
    facts = {
        "id": token.token_id,
        "segment": token.segment,
        "weight version": token.weight_version,
        "log-prob": token.log_prob,
        "loss mask": token.loss_mask,
        "advantage": token.advantage,
        "return": token.returned,
        "age": token.age,
        "old log-prob": token.old_log_prob,
        "ratio": token.ratio,
        "reference log-prob": token.ref_log_prob,
        "teacher log-prob": token.teacher_log_prob,
        "value": token.value,
    }
    known = {name: fact for name, fact in facts.items() if fact is not None}
    return ", ".join(
        f"{name} {fact:.6g}" if isinstance(fact, float) else f"{name} {fact}" for name, fact in known.items()
    )


def _reference(reference: "CommitReference") -> str:
    return f"{reference.name} of {reference.run} ({_short(reference.digest)})"


def _short(digest: str | None) -> str:
    return "–" if digest is None else digest[:_DIGITS]


def _line(text: str) -> str:
    return text.replace("\n", "⏎")
