"""Where a run's metrics are shown, as `tracking` says. A tracker is a view of the ledger: see `tracker.py`."""

from cairn.configs.schema.run import RunConfig
from cairn.flows.trackers import tensorboard
from cairn.flows.trackers.tracker import Tracker
from cairn.storage.ledger import Ledger


def trackers(ledger: Ledger, config: RunConfig) -> dict[str, Tracker]:
    """By their names, what `tracking` asks for. Raises ConfigError if something of it cannot be used."""
    found = {}
    if config.tracking.tensorboard_dir is not None:
        found["TensorBoard"] = Tracker(ledger, config, tensorboard.board(config.tracking.tensorboard_dir, ledger.run))
    return found
