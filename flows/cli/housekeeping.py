"""Commands that look after a store: gc and delete remove things, probe finds out whether it can carry runs."""

from typing import TYPE_CHECKING, Annotated

import typer

from cairn.flows.cli.app import (
    BadInput,
    EvalsOption,
    JsonOption,
    OptionalRunArgument,
    RunArgument,
    StoreOption,
    print_json,
    require_one,
    say,
    tell,
)
from cairn.flows.cli.decisions import AsOption, WhyOption
from cairn.flows.cli.reading import answering_store, open_ledger
from cairn.flows.cli.tables import print_garbage, reporting

if TYPE_CHECKING:
    from cairn.storage.store import Store


def gc(
    run: OptionalRunArgument = None,
    evals: EvalsOption = False,
    apply: Annotated[bool, typer.Option("--apply", help="Remove what was found.")] = False,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Find files of a run that nobody needs; remove them if asked to.

    What interrupted drivers left behind: attempts that lost, groups that have gone into a committed shard, writes that
    did not end. And what the run's retention does not keep: `checkpoint.save_retain_interval` and
    `checkpoint.retain_snapshots`. Safe beside a live driver: what it writes, and finished groups that the next driver
    takes over, are left alone. With --evals what interrupted evaluations left behind, whoever asked for them.

    Examples:

    - `cairn gc quickstart` shows what would go
    - `cairn gc quickstart --apply`
    - `cairn gc --evals --apply`
    """
    require_one(run, evals)
    if run is None:
        from cairn.flows.cli.evaluation_upkeep import gc_evals

        return gc_evals(answering_store(store), apply, json)
    from cairn.configs.loader import from_manifest
    from cairn.storage.collector import collect, garbage
    from cairn.storage.retention import due, retire

    ledger = open_ledger(store, run)
    keep = from_manifest(ledger.manifest.config).checkpoint
    old = retire(ledger, keep, everything=True) if apply else list(due(ledger, keep, everything=True))
    found = list(garbage(ledger))
    if apply:
        collect(ledger, found)
    if json:
        rows = [one.model_dump(mode="json") for one in (*old, *found)]
        print_json({"run": run, "removed": apply, "retention": rows[: len(old)], "garbage": rows[len(old) :]})
    else:
        print_garbage(run, old, found, removed=apply)
    return None


def delete(
    run: RunArgument,
    prompt: Annotated[
        int | None,
        typer.Option("--prompt", metavar="N", min=0, help="Only the samples of row N of the data set, from 0."),
    ] = None,
    why: WhyOption = None,
    by: AsOption = None,
    yes_delete: Annotated[
        str | None, typer.Option("--yes-delete", metavar="RUN", help="The name again, instead of typing it.")
    ] = None,
    store: StoreOption = ".",
) -> None:
    """Delete a run with all its samples, checkpoints and metrics, or the samples of one prompt. There is no way back.

    Asks for the name again. Refused while a driver lives, and while other runs that were forked from it need it. A
    deletion that was interrupted is finished by giving the command again; the run cannot be used in between.

    With `--prompt` the text and the tokens of the prompt's samples are taken out of every table of the run, which stays
    usable; a driver may be at work. Rows, rewards and digests stay, and a commit names what was redacted, by whom, why,
    and which weights saw it. Refused while samples are needed to bring weights back: until a checkpoint follows.

    Examples:

    - `cairn delete quickstart`
    - `cairn delete quickstart --yes-delete quickstart` in scripts
    - `cairn delete quickstart --prompt 17 --why "its author asked for it"`
    """
    from cairn.storage.deletion import delete_run

    opened = answering_store(store)
    if prompt is not None:
        _delete_prompt(store, run, prompt, by=by, why=why, yes_delete=yes_delete)
        return
    if why is not None or by is not None:
        raise BadInput("--why and --as are for --prompt: of a run that is deleted nothing is left to say it")
    if yes_delete is None:
        yes_delete = _typed_name(opened, run)
    if yes_delete != run:
        raise BadInput(f"the name given again is {yes_delete!r}, not {run!r}; nothing was deleted")
    try:
        delete_run(opened, run)
    except (FileNotFoundError, ValueError) as error:
        raise BadInput(str(error)) from None
    tell(f"run {run} is deleted")


def _delete_prompt(
    store_url: str, run: str, prompt: int, *, by: str | None, why: str | None, yes_delete: str | None
) -> None:
    from cairn.storage.decision_kinds import Redaction
    from cairn.storage.redaction import redact
    from cairn.tasks.quarantine import wanted

    ledger = open_ledger(store_url, run)
    if yes_delete is None:
        tell(
            f"This takes the text and the tokens of prompt {prompt} out of run {run!r} in {ledger.store.url} for ever."
        )
        yes_delete = typer.prompt("Type the run's name to do so", err=True, default="", show_default=False)
    if yes_delete != run:
        raise BadInput(f"the name given again is {yes_delete!r}, not {run!r}; nothing was deleted")
    unreached: list[str] = []
    with reporting() as progress:
        try:
            decision = redact(ledger, prompt, by=by, why=why, progress=progress, unreached=unreached.append)
        except ValueError as error:
            raise BadInput(str(error)) from None
    what = decision.what
    assert isinstance(what, Redaction)
    tell(
        f"prompt {prompt} is redacted in run {run}: {what.samples} samples, {len(what.files)} tables (decision "
        f"{decision.number})"
    )
    if what.trained_in:
        iterations = ", ".join(map(str, what.trained_in))
        tell(
            f"updates of iteration {iterations} were made from them: weights from version {min(what.weight_versions)} "
            "on have seen them"
        )
    for sentence in unreached:
        tell(f"not reached: {sentence}")
    if prompt not in wanted(ledger, ledger.decisions.all()):
        tell(f"it may be drawn again; cairn quarantine {run} --prompt {prompt} keeps the run from it")


def _typed_name(store: "Store", run: str) -> str:
    """What a person types when asked for the name; nothing where nobody can be asked."""
    tell(f"This deletes run {run!r} in {store.url} for ever.")
    return typer.prompt("Type the run's name to delete it", err=True, default="", show_default=False)


def probe(json: JsonOption = False, store: StoreOption = ".") -> None:
    """Find out whether a store can carry runs: it answers, gives back what is written, and refuses a second exclusive
    create. Leaves nothing behind. Every run does this before it starts.

    Examples:

    - `cairn probe --store s3://bucket/experiments`
    """
    from cairn.storage.store import open_for_runs

    url = open_for_runs(store).url
    if json:
        print_json({"store": url, "fit": True})
    else:
        say(f"{url} can carry runs")
