"""Trackers of a run's metrics, as `tracking` configures them. They store copies of the ledger's data: see
`tracker.py`."""

from functools import partial

from cairn.configs.schema.run import RunConfig
from cairn.flows.watching.trackers import tensorboard
from cairn.flows.watching.trackers.mlflow import MlflowRun
from cairn.flows.watching.trackers.prometheus import Prometheus
from cairn.flows.watching.trackers.tracker import Tracker
from cairn.flows.watching.trackers.wandb import WandbRun
from cairn.flows.watching.watchers import Watcher
from cairn.storage.ledger.ledger import Ledger


def trackers(ledger: Ledger, config: RunConfig) -> dict[str, Watcher]:
    """Return the configured trackers by name. Raises ConfigError if a folder or a port of them cannot be used."""
    tracking = config.tracking
    opened: dict[str, Watcher] = {}
    if tracking.tensorboard_dir is not None:
        opened["TensorBoard"] = Tracker(ledger, config, tensorboard.board(tracking.tensorboard_dir, ledger.run))
    if tracking.use_wandb:
        opened["Weights & Biases"] = Tracker(ledger, config, partial(WandbRun, ledger, config))
    if tracking.use_mlflow:
        opened["MLflow"] = Tracker(ledger, config, partial(MlflowRun, ledger, config))
    if tracking.prometheus_port is not None:
        opened["Prometheus"] = Prometheus(ledger, config, tracking.prometheus_host, tracking.prometheus_port)
    return opened
