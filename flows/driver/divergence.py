"""What a driver does when replay gives other weights than were committed (`recovery.on_divergence`)."""

from cairn.configs.errors import ConfigError
from cairn.configs.loader import from_manifest
from cairn.configs.schema.run import RunConfig
from cairn.flows.events import OnEvent
from cairn.flows.fork import CannotFork, fork
from cairn.storage import layout
from cairn.storage.commits import Step
from cairn.storage.errors import Retired
from cairn.storage.ledger import Ledger
from cairn.storage.retention import newest_checkpoint
from cairn.storage.store import Store
from cairn.tasks.events import Message
from cairn.tasks.recovery import ReplayDiverged


def fork_after_divergence(
    store: Store, run: str, error: ReplayDiverged, on_event: OnEvent, given: RunConfig | None = None
) -> str:
    """Fork the run at its newest checkpoint, as it asks for, unless that was done; returns the fork's name. The fork's
    manifest says why there is one.

    The iterations after the checkpoint are done again by the fork: what they committed stays with the run. `given`:
    the recipe, where the user gave one. Raises `error` where the run asks to stop, and says so where there is no
    checkpoint to go on from, or none that a fork would help.
    """
    ledger = Ledger.open(store, run)
    if from_manifest(ledger.manifest.config).recovery.on_divergence == "stop":
        raise error
    saved = newest_checkpoint(ledger, ledger.last_iteration() or 0)
    if saved is None:
        raise ReplayDiverged(f"{error}. No checkpoint is there to fork the run at: set checkpoint.save_interval")
    if ledger.find(saved.iteration + 1, Step.TRAIN) is None:
        raise ReplayDiverged(
            f"{error}. Nothing was replayed: the checkpoint itself diverges, for a fork of the run too"
        )
    if saved.iteration < ledger.first_iteration - 1:
        raise ReplayDiverged(
            f"{error}. The newest checkpoint, of iteration {saved.iteration}, lies before {run} was forked: a fork "
            f"there would do iterations of {ledger.owner(saved.iteration + 1).run} again with the options of {run}"
        )
    name = f"{run}-from-{layout.digits(saved.iteration)}"
    try:
        if not _is_there(ledger, name, saved.iteration):
            fork(ledger, saved.iteration, name, reason=str(error), given=given)
    except (CannotFork, ConfigError, Retired, ValueError) as why:
        raise ReplayDiverged(f"{error}. The run cannot be forked as {name} either: {why}") from why
    on_event(Message(str(error), "warning"))
    on_event(Message(f"Run {run} stays as it is; its fork {name} goes on from iteration {saved.iteration}", "warning"))
    return name


def _is_there(ledger: Ledger, name: str, iteration: int) -> bool:
    """Whether a driver has made this fork before."""
    if not ledger.store.exists(layout.run_manifest(name)):
        return False
    parent = Ledger.open(ledger.store, name).manifest.parent
    return parent is not None and (parent.run, parent.iteration) == (ledger.run, iteration)
