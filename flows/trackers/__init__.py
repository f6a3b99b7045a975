"""Where a run's metrics are shown, as `tracking` says. A tracker is a view of the ledger: see `tracker.py`."""

from cairn.configs.schema.run import RunConfig
from cairn.flows.trackers import mlflow, tensorboard, wandb
from cairn.flows.trackers.tracker import Tracker
from cairn.storage.ledger import Ledger


def trackers(ledger: Ledger, config: RunConfig) -> dict[str, Tracker]:
    """By their names, what `tracking` asks for. Raises ConfigError if the folder of TensorBoard cannot be used."""
    tracking, found = config.tracking, {}
    if tracking.tensorboard_dir is not None:
        found["TensorBoard"] = Tracker(ledger, config, tensorboard.board(tracking.tensorboard_dir, ledger.run))
    if tracking.use_wandb:
        found["Weights & Biases"] = Tracker(ledger, config, wandb.board(ledger, config))
    if tracking.use_mlflow:
        found["MLflow"] = Tracker(ledger, config, mlflow.board(ledger, config))
    return found
