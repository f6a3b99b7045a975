"""Who is told of a run and how: nothing here changes what is computed."""

from typing import Literal

from cairn.configs.schema.base import Section


class TrackingConfig(Section):
    """Where metrics are shown. See docs/tracking.md."""

    tensorboard_dir: str | None = "tensorboard"
    """Local folder for TensorBoard event files, one sub-folder a run; null writes none."""

    use_wandb: bool = False
    """Show the run in Weights & Biases; the key is read from `WANDB_API_KEY` or `wandb login`. Needs the extra `wandb`.
    slime: `--use-wandb`."""

    wandb_mode: Literal["online", "offline"] = "online"
    """`offline` writes files for `wandb sync`, and asks for no network and no key. slime: `--wandb-mode`."""

    wandb_project: str = "cairn"
    """slime: `--wandb-project`."""

    wandb_group: str | None = None
    """slime: `--wandb-group`."""

    wandb_team: str | None = None
    """Team or user that the project belongs to; by default the key's. slime: `--wandb-team`."""

    wandb_host: str | None = None
    """Address of a W&B server of your own. slime: `--wandb-host`."""

    wandb_dir: str = "."
    """Local folder in which W&B makes its folder `wandb`. slime: `--wandb-dir`."""

    use_mlflow: bool = False
    """Show the run in MLflow. Needs the extra `mlflow`."""

    mlflow_tracking_uri: str = "sqlite:///mlflow.db"
    """A database, `sqlite:///FILE` or `postgresql://…`, or an MLflow server, `http://host:port`."""

    mlflow_experiment: str = "cairn"
    """Name of the experiment that holds the run; it is made if it is not there."""
