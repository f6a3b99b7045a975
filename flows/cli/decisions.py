"""Commands by which people decide about a run: approve, reject, pin, unpin, quarantine; keygen, for who signs that."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.flows.cli.app import BadInput, JsonOption, RunArgument, StoreOption, print_json, say, tell, writing
from cairn.flows.cli.reading import open_ledger
from cairn.storage.layout import LAST_NUMBER

if TYPE_CHECKING:
    from cairn.storage.decisions import Decision
    from cairn.storage.ledger import Ledger

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
    from cairn.storage.pins import pin as pinned

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
    from cairn.storage.pins import unpin as released

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
    from cairn.storage.decision_kinds import Quarantine

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
    from cairn.storage.decisions import this_user
    from cairn.storage.signatures import new_key

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
    from cairn.flows.driver.gates import decide
    from cairn.storage.decision_kinds import Verdict

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
