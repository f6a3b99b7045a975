"""The restore point of a fork that trains otherwise than its parent did: see `needs_restore_point`."""

from collections.abc import Callable
from uuid import uuid4

from cairn.configs.digest import digest
from cairn.configs.loader import from_manifest
from cairn.configs.schema.run import RunConfig
from cairn.flows.driver.sources import Sources
from cairn.flows.driver.starting import fleet_name, starting_fleet, total_steps
from cairn.flows.driver.trust import recorded_config
from cairn.flows.events import Event
from cairn.storage.commits import Step
from cairn.storage.ledger import Ledger
from cairn.tasks.checkpoint import checkpoint
from cairn.tasks.events import Message
from cairn.tasks.selection import last_selection
from cairn.tasks.train import train


def needs_restore_point(ledger: Ledger, config: RunConfig) -> bool:
    """Whether a run is a fork that trains otherwise than its parent did, from weights that no checkpoint holds: they
    can only be had by replay under the parent's configuration."""
    if ledger.parent is None:
        return False
    last = ledger.first_iteration - 1
    before = from_manifest(ledger.owner(last).manifest.config)
    same = digest(config, train.options) == digest(before, train.options)
    return not same and any(ledger.find(i, Step.CHECKPOINT) is None for i in _sampled_from(ledger))


def make_restore_point(
    ledger: Ledger,
    config: RunConfig,
    sources: Sources,
    emit: Callable[[Event], None],
    given: RunConfig | None = None,
) -> None:
    """Commit checkpoints of the last iterations that a fork shares, all that it samples from, by engines with its
    parent's configuration, in the fork's cluster. `given`: the fork's recipe, where the user gave one. Raises
    ConfigError where a store must not ask for what the parent's configuration does."""
    last = ledger.first_iteration - 1
    owner = ledger.owner(last)
    before = recorded_config(owner, config, given)
    emit(Message(f"Restoring the weights of iteration {last} as run {owner.run} trained them"))
    # This driver's alone, and gone with it on a joined cluster too: a successor may need their room, and not them.
    name = f"{fleet_name(ledger.store, ledger.run)}-restore-{uuid4().hex[:8]}"
    with starting_fleet(before, name, total_steps(owner, before), owner.manifest.inputs, None) as fleet:
        run = sources.context(before, ledger, fleet, {}, emit, given)
        for index in _sampled_from(ledger):
            if run.find(index, Step.CHECKPOINT) is None:
                checkpoint(run, index, None, run.committed(index, Step.TRAIN), last_selection(run, index))


def _sampled_from(ledger: Ledger) -> range:
    """The iterations that a fork shares whose weights its own ones sample from."""
    return range(max(0, ledger.first_iteration - 1 - ledger.lag), ledger.first_iteration)
