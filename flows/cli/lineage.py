"""`cairn lineage`: where a sample came from and what it went into."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.flows.cli.app import BadInput, JsonOption, RunArgument, StoreOption, print_json
from cairn.flows.cli.reading import open_ledger
from cairn.storage.layout import LAST_NUMBER

if TYPE_CHECKING:
    from cairn.flows.reading.lineage_records import Lineage, Made, Token, Update

_DIGITS = 12
"""Of a digest, for people."""
_LAST_ID = 2**63 - 1
"""That a column of a table holds."""


def lineage(
    run: RunArgument,
    iteration: Annotated[
        int,
        typer.Argument(metavar="ITER", min=0, max=LAST_NUMBER, help="That generated the sample, or trained on it."),
    ],
    group: Annotated[
        int, typer.Argument(metavar="GROUP", min=0, max=_LAST_ID, help="The sample's group; `cairn show` names it.")
    ],
    sample: Annotated[
        int, typer.Argument(metavar="SAMPLE", min=0, max=_LAST_ID, help="Its position in the group, from 0.")
    ],
    token: Annotated[
        int | None, typer.Argument(metavar="[TOKEN]", min=0, help="Position in the response, from 0.")
    ] = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Say where a sample came from and what it went into: the prompt's row, the weights that sampled it and their
    digest, the grader and its source, the update that consumed it, and the checkpoints and publications that hold it.

    With TOKEN also what is known of one token: its log-prob, weight version, advantage, age and ratio. Every commit and
    table on the way is held against its digest.

    Examples:

    - `cairn lineage quickstart 5 170 3`
    - `cairn lineage quickstart 5 170 3 12` says how token 12 came to be and was trained on
    - `cairn lineage quickstart 5 170 3 --json | jq .update.state_digest`
    """
    from cairn.flows.reading.lineage import lineage as found_lineage

    try:
        found = found_lineage(open_ledger(store, run), iteration, group, sample, token)
    except LookupError as error:
        raise BadInput(str(error)) from None
    if json:
        print_json(found.model_dump(mode="json"))
    else:
        _print(found)


def _print(found: "Lineage") -> None:
    from rich.text import Text

    from cairn.flows.cli.tables import console
    from cairn.flows.text.terminal import printable

    out = console()
    facts = list(_facts(found))
    width = max(len(name) for name, _ in facts)
    for name, fact in facts:
        out.print(Text.assemble((name.ljust(width + 3), "dim"), printable(fact)), soft_wrap=True)


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
        yield "sampled by", f"{where}; {_made(sampled.made_by)}"
    else:
        yield "read by", _made(sampled.made_by)
    for weights in sampled.weights:
        if weights.made_by is None:
            yield "weights", f"version {weights.version}, the initial ones ({_short(sampled.model_digest)})"
        else:
            digests = f"state {_short(weights.state_digest)}, published {_short(weights.published_digest)}"
            yield "weights", f"version {weights.version}, {digests}; {_made(weights.made_by)}"
    if grade is None:
        yield "reward", "not graded"
    else:
        source = ", ".join(f"{name} {_short(digest)}" for name, digest in grade.sources.items())
        grader = f"{grade.grader}, version {grade.grader_version}{f' ({source})' if source else ''}"
        yield "reward", "–" if grade.reward is None else f"{grade.reward:g}"
        yield "graded by", f"{grader}; {_made(grade.made_by)}"
        if grade.error:
            yield "error", _line(grade.error)
    for judged in found.judgements:
        reason = f" ({judged.reason})" if judged.reason else ""
        yield f"iteration {judged.iteration}", f"{judged.disposition}{reason}; {_made(judged.made_by)}"
    yield from _use(found, update)
    if found.token is not None:
        yield f"token {found.token.position}", _token(found.token)


def _use(found: "Lineage", update: "Update | None") -> Iterator[tuple[str, str]]:
    if update is None:
        yield "trained on", "not by any update"
        return
    if update.estimated_by is not None:
        yield "advantage", f"{_number(update.advantage)}, age {_count(update.age)}; {_made(update.estimated_by)}"
    versions = f"version {update.weight_version_in} → {update.weight_version_out}"
    yield (
        "trained on",
        f"{versions}, 1 of {update.samples} samples, loss {_number(update.loss)}; {_made(update.made_by)}",
    )
    yield "left", f"state {_short(update.state_digest)}, published {_short(update.published_digest)}"
    kept = [str(saved.iteration) for saved in found.checkpoints if not saved.retired]
    retired = len(found.checkpoints) - len(kept)
    shown = ", ".join(kept if len(kept) < 8 else [*kept[:3], "…", *kept[-2:]]) or "none"
    yield "checkpoints", f"of iterations {shown}{f'; {retired} more are retired' if retired else ''}" if kept else shown


def _token(token: "Token") -> str:
    facts = {
        "id": str(token.token_id),
        "segment": str(token.segment),
        "weight version": str(token.weight_version),
        "log-prob": _number(token.log_prob),
        "loss mask": str(token.loss_mask),
        "advantage": _number(token.advantage),
        "return": _number(token.returned),
        "age": _count(token.age),
        "old log-prob": _number(token.old_log_prob),
        "ratio": _number(token.ratio),
        "reference log-prob": _number(token.ref_log_prob),
        "teacher log-prob": _number(token.teacher_log_prob),
        "value": _number(token.value),
    }
    return ", ".join(f"{name} {fact}" for name, fact in facts.items() if fact != "–")


def _made(made: "Made") -> str:
    return f"{made.name} of {made.run} ({_short(made.digest)})"


def _short(digest: str | None) -> str:
    return "–" if digest is None else digest[:_DIGITS]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"


def _count(value: int | None) -> str:
    return "–" if value is None else str(value)


def _line(text: str) -> str:
    return text.replace("\n", "⏎")
