"""Commands that look after a store: gc and delete remove things, probe finds out whether it can carry runs."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.flows.cli.app import (
    BadInput,
    EvalsOption,
    JsonOption,
    OptionalRunArgument,
    RunArgument,
    StoreOption,
    require_one,
    writing,
)
from cairn.flows.cli.printing import print_json, say, tell
from cairn.flows.cli.reading import answering_store, open_ledger
from cairn.flows.cli.tables import print_garbage, reporting
from cairn.storage.ledger.layout import LAST_NUMBER

if TYPE_CHECKING:
    from cairn.storage.ledger.decisions import Decision
    from cairn.storage.ledger.ledger import Ledger
    from cairn.storage.store.store import Store


# Commands by which people decide about a run: approve, reject, pin, unpin, quarantine; keygen, for who signs that.


GateArgument = Annotated[
    int | None,
    typer.Argument(
        metavar="[ITER]", min=0, max=LAST_NUMBER, help="The iteration that waits; by default the one that does.",
        show_default=False,
    ),
]  # fmt: skip
WhyOption = Annotated[str | None, typer.Option("--why", metavar="TEXT", help="The reason, for who reads the ledger.")]
AsOption = Annotated[str | None, typer.Option("--as", metavar="NAME", help="Who decides, instead of user@host.")]


def approve(
    run: RunArgument,
    iteration: GateArgument = None,
    why: WhyOption = None,
    by: AsOption = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Let a run go on that waits for a person before an iteration; `approval` in its recipe says where it does.

    The verdict is a commit in the run's ledger, with who gave it, when and why. A driver that waits begins the
    iteration within seconds; one that has ended is started by `cairn resume`. A gate that was rejected may be approved
    later, and one that is yet to come ahead of time; it is not asked again.

    Examples:

    - `cairn approve quickstart --why "rewards look sound"`
    - `cairn approve quickstart 20` before the run comes to iteration 20
    """
    _verdict(run, iteration, approved=True, why=why, by=by, json=json, store=store)


def reject(
    run: RunArgument,
    iteration: GateArgument = None,
    why: WhyOption = None,
    by: AsOption = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Let a run end that waits for a person before an iteration. Its driver ends in order, with exit code 3.

    Nothing committed is lost: `cairn fork` goes on from any iteration with other options, and `cairn approve` changes
    the verdict.

    Examples:

    - `cairn reject quickstart --why "answers got shorter and shorter"`
    """
    _verdict(run, iteration, approved=False, why=why, by=by, json=json, store=store)


PinnedArgument = Annotated[
    int, typer.Argument(metavar="ITER", min=0, max=LAST_NUMBER, help="Number of the iteration, from 0.")
]


def pin(
    run: RunArgument,
    iteration: PinnedArgument,
    why: WhyOption = None,
    by: AsOption = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Keep an iteration's weights and samples for good, whatever the run's retention says.

    Kept are its snapshots and its checkpoint; where it has none, the checkpoint before it and the snapshots since, from
    which its weights are had again, bit for bit. So it can be forked, exported, evaluated and looked at later.

    Examples:

    - `cairn pin quickstart 30 --why "shipped as v2"`
    """
    from cairn.storage.upkeep.retention import pin as pinned

    decision = _recorded(store, run, lambda ledger: pinned(ledger, iteration, by=by, why=why))
    _print(decision, f"iteration {iteration} of run {run} is pinned, by {decision.by}", json)


def unpin(
    run: RunArgument,
    iteration: PinnedArgument,
    why: WhyOption = None,
    by: AsOption = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Leave an iteration that was pinned to the run's retention again.

    Examples:

    - `cairn unpin quickstart 30`, and `cairn gc quickstart` then shows what would go
    """
    from cairn.storage.upkeep.retention import unpin as released

    decision = _recorded(store, run, lambda ledger: released(ledger, iteration, by=by, why=why))
    _print(decision, f"iteration {iteration} of run {run} is not pinned any more", json)


def quarantine(
    run: RunArgument,
    prompt: Annotated[
        int, typer.Option("--prompt", metavar="N", min=0, help="Row of the data set, from 0: `prompt_index`.")
    ],
    lift: Annotated[bool, typer.Option("--lift", help="Let it be drawn again.")] = False,
    why: WhyOption = None,
    by: AsOption = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Keep a prompt from being drawn any more: its run passes over it from the next iteration on that it begins.

    The driver records from which one, before it draws that iteration's prompts: the run can be resumed, replayed and
    forked as exactly as before. Groups that were drawn already are finished and trained on.

    Examples:

    - `cairn quarantine quickstart --prompt 17 --why "its label is wrong"`
    - `cairn quarantine quickstart --prompt 17 --lift`
    """
    from cairn.storage.ledger.decisions import Quarantine

    what = Quarantine(prompt=prompt, passed_over=not lift)
    decision = _recorded(store, run, lambda ledger: ledger.decisions.record(lambda so_far: what, by=by, why=why))
    done = "may be drawn again" if lift else "is passed over"
    _print(decision, f"prompt {prompt} {done} from the next iteration on that run {run} begins, by {decision.by}", json)


def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the private key goes; must not be there yet.")],
    by: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="Whose key it is, instead of user@host.")
    ] = None,
) -> None:
    """Make a key that signs what one writes into ledgers, and print the line that lets others check it.

    Whoever has `CAIRN_SIGNING_KEY=FILE` in the environment signs every commit, decision and lease of theirs. The line
    is for the file of `cairn verify RUN --signers`.

    Examples:

    - `cairn keygen ~/.cairn-key --as ada >> team.txt`, then `export CAIRN_SIGNING_KEY=~/.cairn-key`
    """
    from cairn.storage.ledger.decisions import this_user
    from cairn.storage.store.signed import new_key

    name = by or this_user()
    if not name or set(name) & set(" \t\n#"):
        raise BadInput(f"{name!r} is no name for a signer: it is one word without '#'")
    with writing(file):
        say(f"{name} {new_key(file)}")
    tell(f"the private key is in {file}: keep it to yourself, and set CAIRN_SIGNING_KEY={file}")


def _verdict(
    run: str, iteration: int | None, *, approved: bool, why: str | None, by: str | None, json: bool, store: str
) -> None:
    from cairn.configs.loader import from_manifest
    from cairn.flows.reading.gates import decide
    from cairn.storage.ledger.decisions import Verdict

    def decided(ledger: "Ledger") -> "Decision":
        return decide(ledger, from_manifest(ledger.manifest.config), iteration, approved=approved, why=why, by=by)

    decision = _recorded(store, run, decided)
    assert isinstance(decision.what, Verdict)
    word = "approved" if approved else "rejected"
    _print(decision, f"run {run} is {word} before iteration {decision.what.iteration}, by {decision.by}", json)


def _recorded(store: str, run: str, decide: Callable[["Ledger"], "Decision"]) -> "Decision":
    ledger = open_ledger(store, run)
    try:
        return decide(ledger)
    except ValueError as error:
        raise BadInput(str(error)) from None


def _print(decision: "Decision", sentence: str, json: bool) -> None:
    if json:
        print_json(decision.model_dump(mode="json") | {"digest": decision.digest})
    else:
        say(f"{sentence} (decision {decision.number})")


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
        from cairn.flows.cli.reading import gc_evals

        return gc_evals(answering_store(store), apply, json)
    from cairn.configs.loader import from_manifest
    from cairn.storage.upkeep.collector import collect, garbage
    from cairn.storage.upkeep.retention import due, retire

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
    from cairn.storage.upkeep.collector import delete_run

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
    from cairn.storage.ledger.decisions import Redaction
    from cairn.storage.upkeep.redaction import redact
    from cairn.tasks.durable.quarantine import wanted

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
    from cairn.storage.opening import open_for_runs

    url = open_for_runs(store).url
    if json:
        print_json({"store": url, "fit": True})
    else:
        say(f"{url} can carry runs")
