"""Who is told of a run and how: nothing here changes what is computed."""

from typing import Literal

from pydantic import Field

from cairn.configs.schema.base import Section
from cairn.configs.schema.location import Location


class AlarmRule(Section):
    """When to sound an alarm, by the mean over the last `window` iterations; nothing is set by default."""

    below: float | None = None
    """It is less than this."""

    above: float | None = None
    """It is more than this."""

    fall: float | None = Field(None, gt=0)
    """It has fallen by more than this share of the mean over the `window` iterations before: 0.5 is by half."""

    rise: float | None = Field(None, gt=0)
    """It has risen by more than this share of that: 1 is to the double."""

    @property
    def is_set(self) -> bool:
        """Whether anything can sound it."""
        return self != AlarmRule()


class AlarmsConfig(Section):
    """Alarms for a policy that collapses: a warning at the terminal, metrics under `alarm/`, and events in Prefect."""

    window: int = Field(5, ge=1)
    """Iterations that are averaged; an alarm needs as many, `fall` and `rise` twice as many."""

    entropy: AlarmRule = AlarmRule()
    """Of `train/entropy_loss`: a policy that explores no more."""

    response_length: AlarmRule = AlarmRule()
    """Of `rollout/response_len/mean`: responses that become empty or endless."""

    kl: AlarmRule = AlarmRule()
    """Of `train/kl_loss`, or else `rollout/kl`, or else `train/ppo_kl`: a policy that runs away."""

    reward: AlarmRule = AlarmRule()
    """Of `rollout/raw_reward`."""


class TrackingConfig(Section):
    """Where metrics are shown. See docs/tracking.md."""

    tensorboard_dir: Location | None = "tensorboard"
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

    wandb_host: Location | None = None
    """Address of a W&B server of your own. slime: `--wandb-host`."""

    wandb_dir: Location = "."
    """Local folder in which W&B makes its folder `wandb`. slime: `--wandb-dir`."""

    use_mlflow: bool = False
    """Show the run in MLflow. Needs the extra `mlflow`."""

    mlflow_tracking_uri: Location = "sqlite:///mlflow.db"
    """A database, `sqlite:///FILE` or `postgresql://…`, or an MLflow server, `http://host:port`."""

    mlflow_experiment: str = "cairn"
    """Name of the experiment that holds the run; it is made if it is not there."""

    prometheus_port: int | None = Field(None, ge=1, le=65535)
    """Port at which the driver answers Prometheus, at the path `/metrics`, as long as it works; null opens none."""

    prometheus_host: Location = "127.0.0.1"
    """Address that it listens on; `0.0.0.0` answers other machines too, without a password."""

    peak_tflops: float | None = Field(None, gt=0)
    """TFLOP/s that one training device can do at most in `training.dtype`, for `perf/mfu`; by default what its maker
    says of the GPU, where Cairn knows it."""

    alarms: AlarmsConfig = AlarmsConfig()
