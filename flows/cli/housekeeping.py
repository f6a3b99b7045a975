"""Commands that maintain a store, gc, delete and probe, and commands by which people decide about a run."""

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


# Decisions of people about a run: approve, reject, pin, unpin, quarantine; and keygen, for keys that sign them.


GateArgument = Annotated[
    int | None,
    typer.Argument(
        metavar="[ITER]", min=0, max=LAST_NUMBER, help="Number of the iteration; by default the one that waits.",
        show_default=False,
    ),
]  # fmt: skip
WhyOption = Annotated[str | None, typer.Option("--why", metavar="TEXT", help="The reason, recorded in the ledger.")]
AsOption = Annotated[
    str | None, typer.Option("--as", metavar="NAME", help="Name of the deciding person; by default user@host.")
]


def approve(
    run: RunArgument,
    iteration: GateArgument = None,
    why: WhyOption = None,
    by: AsOption = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Approve a run that waits for a person before an iteration. `approval` in its recipe says where it waits.

    The verdict is a commit in the run's ledger, with its author, time and reason. A waiting driver begins the iteration
    within seconds; if the driver has ended, `cairn resume` starts a new one. You may approve a rejected gate later, and
    a future gate in advance; the run does not wait there then.

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
    """Reject a run that waits for a person before an iteration. Its driver shuts down cleanly, with exit code 3.

    No commit is lost: `cairn fork` continues from any iteration with other options, and `cairn approve` changes the
    verdict.

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
    """Keep an iteration's weights and samples permanently, whatever the run's retention says.

    The iteration's snapshots and its checkpoint are kept. If it has no checkpoint, the last one before it and the
    snapshots since then are kept: they restore the weights bit for bit. So you can fork, export, evaluate and inspect
    the iteration later.

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
    """Undo a pin: the run's retention applies to the iteration again.

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
    lift: Annotated[bool, typer.Option("--lift", help="Allow the prompt to be drawn again.")] = False,
    why: WhyOption = None,
    by: AsOption = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Exclude a prompt from a run: it is not drawn from the next iteration on that the run begins.

    The driver records that iteration before it draws its prompts. So the run can still be resumed, replayed and forked
    exactly. Groups that are already drawn are finished and trained on.

    Examples:

    - `cairn quarantine quickstart --prompt 17 --why "its label is wrong"`
    - `cairn quarantine quickstart --prompt 17 --lift`
    """
    from cairn.storage.ledger.decisions import Quarantine

    what = Quarantine(prompt=prompt, passed_over=not lift)
    decision = _recorded(store, run, lambda ledger: ledger.decisions.record(lambda so_far: what, by=by, why=why))
    done = "may be drawn again" if lift else "is skipped"
    _print(decision, f"prompt {prompt} {done} from the next iteration that run {run} begins, by {decision.by}", json)


def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File for the private key; must not exist yet.")],
    by: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="Owner of the key; by default user@host.")
    ] = None,
) -> None:
    """Create a key that signs what you write into ledgers, and print the line with which others check it.

    With `CAIRN_SIGNING_KEY=FILE` in the environment, Cairn signs every commit, decision and lease that you write. The
    printed line goes into the file of `cairn verify RUN --signers`.

    Examples:

    - `cairn keygen ~/.cairn-key --as ada >> team.txt`, then `export CAIRN_SIGNING_KEY=~/.cairn-key`
    """
    from cairn.storage.ledger.decisions import this_user
    from cairn.storage.store.signed import new_key

    name = by or this_user()
    if not name or set(name) & set(" \t\n#"):
        raise BadInput(f"{name!r} is not a name for a signer: use one word without '#'")
    with writing(file):
        say(f"{name} {new_key(file)}")
    tell(f"the private key is in {file}: keep it secret, and set CAIRN_SIGNING_KEY={file}")


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
    apply: Annotated[bool, typer.Option("--apply", help="Remove the listed files.")] = False,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """List files of a run that nothing needs. `--apply` removes them.

    Interrupted drivers leave such files: attempts that lost, groups that are now in a committed shard, incomplete
    writes. The run's retention frees others: `checkpoint.save_retain_interval` and `checkpoint.retain_snapshots`. The
    command is safe next to a live driver. It skips what that driver writes, and finished groups that the next driver
    will use. With --evals it finds what interrupted evaluations left, of all users.

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
        str | None,
        typer.Option("--yes-delete", metavar="RUN", help="Confirm with the run's name, instead of typing it."),
    ] = None,
    store: StoreOption = ".",
) -> None:
    """Delete a run with all its samples, checkpoints and metrics, or the samples of one prompt. This cannot be undone.

    You have to type the name again. The command refuses while a driver lives, and while forks of the run need it.
    Repeat the command to finish an interrupted deletion; the run cannot be used in between.

    With `--prompt` the text and the tokens of the prompt's samples are removed from every table of the run. The run
    stays usable, and a driver may be running. Rows, rewards and digests stay. A commit records what was redacted, by
    whom, why, and which weights were trained on it. The command refuses while the samples are needed to restore
    weights, until a later checkpoint exists.

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
        raise BadInput("--why and --as need --prompt: a deleted run has no ledger to record them")
    if yes_delete is None:
        yes_delete = _typed_name(opened, run)
    if yes_delete != run:
        raise BadInput(f"the confirmed name is {yes_delete!r}, not {run!r}; nothing was deleted")
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
            f"This permanently removes the text and the tokens of prompt {prompt} from run {run!r} in "
            f"{ledger.store.url}."
        )
        yes_delete = typer.prompt("Type the run's name to do so", err=True, default="", show_default=False)
    if yes_delete != run:
        raise BadInput(f"the confirmed name is {yes_delete!r}, not {run!r}; nothing was deleted")
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
            f"updates of iteration {iterations} trained on them: weights from version {min(what.weight_versions)} on "
            "contain their effect"
        )
    for sentence in unreached:
        tell(f"not reached: {sentence}")
    if prompt not in wanted(ledger, ledger.decisions.all()):
        tell(f"it may be drawn again; cairn quarantine {run} --prompt {prompt} excludes it")


def _typed_name(store: "Store", run: str) -> str:
    """Ask the user to type the run's name, and return the input; empty where nobody can answer."""
    tell(f"This permanently deletes run {run!r} in {store.url}.")
    return typer.prompt("Type the run's name to delete it", err=True, default="", show_default=False)


def probe(json: JsonOption = False, store: StoreOption = ".") -> None:
    """Check whether a store can hold runs. Every run does this before it starts.

    The store must respond, return what was written, and refuse to create an existing file a second time. Nothing is
    left behind.

    Examples:

    - `cairn probe --store s3://bucket/experiments`
    """
    from cairn.storage.opening import open_for_runs

    url = open_for_runs(store).url
    if json:
        print_json({"store": url, "fit": True})
    else:
        say(f"{url} can store runs")
