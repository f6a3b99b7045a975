"""Commands by which people decide about a run: approve, reject, pin, unpin, quarantine; and keygen, for keys that sign
such decisions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from cairn.configs.errors import BadInput
from cairn.flows.cli.command import IterationArgument, Root, RunArgument, Shown, bad_input, complete_run, writing
from cairn.flows.cli.printing import print_stderr
from cairn.flows.reading.address import Address, iteration_of, newest, parser

if TYPE_CHECKING:
    from cairn.storage.ledger.decisions import Decision
    from cairn.storage.ledger.ledger import Ledger

GateArgument = Annotated[
    Address,
    Argument(
        metavar="RUN[@ITER]",
        help="A run, and the number of an iteration from 0; the one that waits by default.",
        parser=parser("RUN[@ITER]"),
        autocompletion=complete_run,
    ),
]
WhyOption = Annotated[str | None, Option("--why", metavar="TEXT", help="The reason, recorded in the ledger.")]
AsOption = Annotated[
    str | None, Option("--as", metavar="NAME", help="Name of the deciding person; by default user@host.")
]


def approve(
    root: Root,
    place: GateArgument,
    why: WhyOption = None,
    by: AsOption = None,
) -> Shown:
    """Approve a run that waits for a person.

    `approval` in its recipe says before which iterations it waits. The verdict is a commit in the run's ledger, with
    its author, time and reason. A waiting driver begins the iteration within seconds; if the driver has ended, `cairn
    resume` starts a new one. You may approve a rejected gate later, and a future gate in advance; the run does not wait
    there then.

    Examples:

    - `cairn approve quickstart --why "rewards look sound"`
    - `cairn approve quickstart@20` before the run comes to iteration 20
    """
    return _verdict(root.ledger(place.run), place.iteration, approved=True, why=why, by=by)


def reject(
    root: Root,
    place: GateArgument,
    why: WhyOption = None,
    by: AsOption = None,
) -> Shown:
    """Reject a run that waits for a person.

    Its driver shuts down cleanly, with exit code 3. No commit is lost: `cairn fork` continues from any iteration with
    other options, and `cairn approve` changes the verdict.

    Examples:

    - `cairn reject quickstart --why "answers got shorter and shorter"`
    """
    return _verdict(root.ledger(place.run), place.iteration, approved=False, why=why, by=by)


def pin(
    root: Root,
    place: IterationArgument,
    why: WhyOption = None,
    by: AsOption = None,
) -> Shown:
    """Keep an iteration's weights and samples permanently.

    The run's retention does not apply to it. The iteration's snapshots and its checkpoint are kept. If it has no
    checkpoint, the last one before it and the snapshots since then are kept: they restore the weights bit for bit. So
    you can fork, export, evaluate and inspect the iteration later.

    Examples:

    - `cairn pin quickstart@30 --why "shipped as v2"`
    """
    from cairn.storage.ledger.commits import Step
    from cairn.storage.upkeep.retention import pin as pinned

    ledger = root.ledger(place.run)
    iteration = iteration_of(ledger, place, newest(Step.TRAIN))
    with bad_input(ValueError):
        decision = pinned(ledger, iteration, by=by, why=why)
    return _shown(decision, f"iteration {iteration} of run {place.run} is pinned, by {decision.by}")


def unpin(
    root: Root,
    place: IterationArgument,
    why: WhyOption = None,
    by: AsOption = None,
) -> Shown:
    """Undo a pin: retention applies to the iteration again.

    Examples:

    - `cairn unpin quickstart@30`, and `cairn gc quickstart` then shows what would go
    """
    from cairn.storage.upkeep.retention import unpin as released

    ledger = root.ledger(place.run)
    iteration = iteration_of(ledger, place)
    with bad_input(ValueError):
        decision = released(ledger, iteration, by=by, why=why)
    return _shown(decision, f"iteration {iteration} of run {place.run} is not pinned any more")


def quarantine(
    root: Root,
    run: RunArgument,
    prompt: Annotated[int, Option("--prompt", metavar="N", min=0, help="Row of the data set, from 0: `prompt_index`.")],
    lift: Annotated[bool, Option("--lift", help="Allow the prompt to be drawn again.")] = False,
    why: WhyOption = None,
    by: AsOption = None,
) -> Shown:
    """Exclude a prompt from a run.

    It is not drawn from the next iteration on that the run begins. The driver records that iteration before it draws
    its prompts. So the run can still be resumed, replayed and forked exactly. Groups that are already drawn are
    finished and trained on.

    Examples:

    - `cairn quarantine quickstart --prompt 17 --why "its label is wrong"`
    - `cairn quarantine quickstart --prompt 17 --lift`
    """
    from cairn.storage.ledger.decisions import Quarantine

    what = Quarantine(prompt=prompt, passed_over=not lift)
    with bad_input(ValueError):
        decision = root.ledger(run).decisions.record(lambda so_far: what, by=by, why=why)
    done = "may be drawn again" if lift else "is skipped"
    return _shown(decision, f"prompt {prompt} {done} from the next iteration that run {run} begins, by {decision.by}")


def keygen(
    file: Annotated[Path, Argument(metavar="FILE", help="File for the private key; must not exist yet.")],
    by: Annotated[str | None, Option("--as", metavar="NAME", help="Owner of the key; by default user@host.")] = None,
) -> Shown:
    """Create a key that signs what you write into ledgers.

    The command prints the line with which others check it. With `CAIRN_SIGNING_KEY=FILE` in the environment, Cairn
    signs every commit, decision and lease that you write. The printed line goes into the file of `cairn verify RUN
    --signers`.

    Examples:

    - `cairn keygen ~/.cairn-key --as ada >> team.txt`, then `export CAIRN_SIGNING_KEY=~/.cairn-key`
    """
    from cairn.storage.ledger.decisions import this_user
    from cairn.storage.store.signed import new_key

    name = by or this_user()
    if not name or set(name) & set(" \t\n#"):
        raise BadInput(f"{name!r} is not a name for a signer: use one word without '#'")
    with writing(file):
        key = new_key(file)
    print_stderr(f"the private key is in {file}: keep it secret, and set CAIRN_SIGNING_KEY={file}")
    return Shown({"name": name, "key": key, "file": str(file)}, f"{name} {key}")


def _verdict(ledger: "Ledger", iteration: int | None, *, approved: bool, why: str | None, by: str | None) -> Shown:
    from cairn.configs.loader import from_manifest
    from cairn.flows.reading.gates import decide
    from cairn.storage.ledger.decisions import Verdict

    with bad_input(ValueError):
        config = from_manifest(ledger.manifest.config)
        decision = decide(ledger, config, iteration, approved=approved, why=why, by=by)
    assert isinstance(decision.what, Verdict)
    word = "approved" if approved else "rejected"
    return _shown(decision, f"run {ledger.run} is {word} before iteration {decision.what.iteration}, by {decision.by}")


def _shown(decision: "Decision", sentence: str) -> Shown:
    value = decision.model_dump(mode="json") | {"digest": decision.digest}
    return Shown(value, f"{sentence} (decision {decision.number})")
