"""Trackers of a run's metrics, as `tracking` configures them. They store copies of the ledger's data: see
`tracker.py`."""

from cairn.configs.schema.run import RunConfig
from cairn.flows.watching.trackers import mlflow, tensorboard, wandb
from cairn.flows.watching.trackers.prometheus import Prometheus
from cairn.flows.watching.trackers.tracker import Tracker
from cairn.flows.watching.watchers import Watcher
from cairn.storage.ledger.ledger import Ledger


def trackers(ledger: Ledger, config: RunConfig) -> dict[str, Watcher]:
    """Return the configured trackers by name. Raises ConfigError if a folder or a port of them cannot be used."""
    tracking = config.tracking
    found: dict[str, Watcher] = {}
    if tracking.tensorboard_dir is not None:
        found["TensorBoard"] = Tracker(ledger, config, tensorboard.board(tracking.tensorboard_dir, ledger.run))
    if tracking.use_wandb:
        found["Weights & Biases"] = Tracker(ledger, config, wandb.board(ledger, config))
    if tracking.use_mlflow:
        found["MLflow"] = Tracker(ledger, config, mlflow.board(ledger, config))
    if tracking.prometheus_port is not None:
        found["Prometheus"] = Prometheus(ledger, config, tracking.prometheus_host, tracking.prometheus_port)
    return found
