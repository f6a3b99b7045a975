"""Options of storage, workers, recovery, alarms and tracking. None of them changes what is computed."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from cairn.configs.schema.base import FromStore, Location, OutputFolder, Section, Text, rule
from cairn.configs.schema.effect import ON_GPUS, WITH_ENGINES


class CheckpointConfig(Section):
    """Checkpoints and stored snapshots."""

    save_interval: int | None = Field(None, ge=1)
    """Number of iterations between checkpoints; the last iteration always has one. Null writes only that one, and
    recovery replays the committed steps from the initial weights. slime: `--save-interval`."""

    save_retain_interval: int | None = Field(None, ge=1)
    """Interval of iterations whose checkpoints are retained, a multiple of `save_interval`. The files of other
    checkpoints before the newest are removed. Null retains all. Megatron: `--save-retain-interval`."""

    retain_snapshots: int | None = Field(None, ge=2)
    """Number of newest iterations whose samples and other snapshot files are retained, as well as those that recovery
    would read. Commits, with all metrics and digests, always remain. Null retains all files."""

    retain_weights: int | None = Field(None, ge=1)
    """Number of newest iterations whose stored weights are retained, as well as the weights that these are differences
    to. By default as many as `retain_snapshots`."""

    store_weights: bool | None = None
    """Every iteration stores the weights that it publishes, in `rollout.dtype`, so that they can be evaluated, exported
    and served without a trainer: whole with every checkpoint, and else as the bits that differ from the iteration
    before. By default on, except in runs that a version without this option created."""

    @property
    def retained_weights(self) -> int | None:
        """Number of newest iterations whose stored weights are retained; None for all."""
        return self.retain_snapshots if self.retain_weights is None else self.retain_weights

    @property
    def retains_everything(self) -> bool:
        """Whether no file is ever removed."""
        return self.save_retain_interval is None and self.retain_snapshots is None and self.retain_weights is None

    @rule
    def _recovery_keeps_what_it_needs(self) -> None:
        for name in ("save_retain_interval", "retain_snapshots", "retain_weights"):
            value = getattr(self, name)
            if value is not None and self.save_interval is None:
                raise ValueError(
                    f"{name} is {value} but save_interval is null: without checkpoints recovery needs every file of "
                    "the run; set save_interval, or leave it out"
                )
        if self.save_retain_interval is not None and self.save_retain_interval % (self.save_interval or 1):
            raise ValueError(
                f"save_retain_interval is {self.save_retain_interval}, which is not a multiple of save_interval "
                f"({self.save_interval}): there would be no checkpoint to keep there"
            )


GpuName = Literal["a100-40gb", "a100-80gb", "b200", "h100", "h20", "h200", "h800", "l40s"]
"""Names of the GPUs in `configs/hardware.yaml`."""


class FleetConfig(Section):
    """Ray cluster and its actors."""

    gpu: Annotated[GpuName | None, ON_GPUS] = None
    """GPUs for which the recipe is laid out. `cairn plan` plans for them (null: `h100`), and a run does not start on
    GPUs that are known to have less memory. Their sizes and rates are in `configs/hardware.yaml`."""

    ray_address: Annotated[Location, FromStore.CLUSTER] | None = None
    """Ray cluster to join: `auto` for the one on this machine, or `host:port`. Null starts a cluster that ends with the
    run."""

    num_cpus_per_engine: Annotated[float, WITH_ENGINES] = Field(1, ge=0)
    """CPUs reserved in the placement group for each rollout engine."""

    num_cpus_per_rank: float = Field(1, ge=0)
    """CPUs reserved in the placement group for each training rank."""

    num_cpus_per_episode_worker: float = Field(0, ge=0)
    """CPUs reserved in the placement group for each of `rollout.num_episode_workers`."""

    start_timeout: float = Field(600, gt=0)
    """Seconds that placement and start of all actors may take, including loading of the models."""

    call_timeout: float = Field(120, gt=0)
    """Seconds that a short actor call may take (health, versions, one bucket of weights that is not broadcast)."""

    colocate: Annotated[bool, WITH_ENGINES] = False
    """Training and rollout take turns on the same GPUs, in one placement group. slime: `--colocate`."""

    offload_train: Annotated[bool | None, WITH_ENGINES] = None
    """The training engine releases its GPU memory while others use the GPUs; by default on with `colocate`. slime:
    `--offload-train`."""

    offload_rollout: Annotated[bool | None, WITH_ENGINES] = None
    """The rollout engines release their GPU memory while training uses the GPUs; by default on with `colocate`. slime:
    `--offload-rollout`."""

    update_weight_transport: Annotated[Literal["tensor", "disk", "distributed", "store"], WITH_ENGINES] = "tensor"
    """Transfer of weights to the rollout engines. `tensor`: in buckets through Ray's object store and the memory that
    an engine shares with its server. `disk`: as a model folder that the engines load. `distributed`: in buckets that
    the trainer broadcasts to the servers, over gloo on CPUs and NCCL between GPUs. `store`: the engines read from the
    run's store what `checkpoint.store_weights` wrote there, only the bits that differ where they have the version
    before. slime: `--update-weight-transport`, `--update-weight-mode`."""

    update_weight_buffer_size: Annotated[int, WITH_ENGINES] = Field(512 * 1024**2, ge=1)
    """Size in bytes of a bucket of weights. slime: `--update-weight-buffer-size`."""

    update_weight_disk_dir: Annotated[OutputFolder | None, WITH_ENGINES] = None
    """Folder for the transport `disk`, with the same path on every machine of the fleet. slime:
    `--update-weight-disk-dir`."""

    update_weight_disk_keep_files: Annotated[bool, WITH_ENGINES] = False
    """Retain the model folder of every version there, and not only of the last ones. slime:
    `--update-weight-disk-keep-files`."""

    check_weight_update_equal: Annotated[bool, WITH_ENGINES] = False
    """After every update of weights also compare what servers made of them: SGLang's own checksums, which must be equal
    on all servers of one layout, and, where the training engine keeps its memory and weights, the log-probs of a small
    batch with the trainer's. A checksum of the weights that an engine received is always compared. slime:
    `--check-weight-update-equal`."""

    @property
    def offloads_train(self) -> bool:
        """Whether the training engine releases its GPU memory."""
        return self.colocate if self.offload_train is None else self.offload_train

    @property
    def offloads_rollout(self) -> bool:
        """Whether the rollout engines release their GPU memory."""
        return self.colocate if self.offload_rollout is None else self.offload_rollout

    @rule
    def _the_disk_has_a_folder(self) -> None:
        if (self.update_weight_transport == "disk") != (self.update_weight_disk_dir is not None):
            raise ValueError(
                f"update_weight_transport is {self.update_weight_transport} and update_weight_disk_dir is "
                f"{self.update_weight_disk_dir}: the transport disk needs a folder, and no other transport reads it"
            )


class RecoveryConfig(Section):
    """Handling of weights that replay does not restore bit for bit."""

    on_divergence: Literal["stop", "fork"] = "stop"
    """Action where the replay of a committed train step results in another state than was committed. `stop`: end the
    run with an error that names both digests. `fork`: fork the run at its newest checkpoint, which needs no replay, and
    continue with the fork in the same driver. The run itself stays unchanged, and the fork's manifest records the
    reason."""

    self_test: bool | None = None
    """Once on each kind of machine, after an iteration, compute the gradients of its batch twice, and record in the
    store whether the bits agree. By default on where training has GPUs."""


StepName = Literal["rollout", "reward", "filter", "score", "advantage", "train", "checkpoint", "sync", "eval"]

ErrorClass = Literal["engine_died", "engine_timeout", "engine", "store", "disk", "grader"]
"""Classes of errors that a retry may mend. `engine_died`: the process of an engine is gone. `engine_timeout`: it did
not respond in time. `engine`: any other such failure of an engine. `store`: the store did not respond, or its response
was wrong. `disk`: no space is left. `grader`: the machine kept a grader from running, or the service that it calls did
not respond."""


class Retries(Section):
    """Number of retries, and the delays before them."""

    retries: int = Field(3, ge=0, le=50)
    """Number of retries."""

    retry_delay_seconds: float = Field(1.0, ge=0)
    """Seconds before the first retry; the delay doubles with each further one."""

    max_retry_delay_seconds: float = Field(60.0, ge=0)
    """Longest delay in seconds."""

    def delays(self) -> list[float]:
        """Return the seconds before each retry."""
        longest = max(self.max_retry_delay_seconds, self.retry_delay_seconds)
        return [min(longest, self.retry_delay_seconds * 2.0**attempt) for attempt in range(self.retries)]


class RetryRule(Retries):
    """Retries of some steps, or after some classes of errors."""

    steps: tuple[StepName, ...] = ()
    """Steps to which the rule applies; empty: all."""

    errors: tuple[ErrorClass, ...] = ()
    """Classes of errors to which the rule applies; empty: all."""

    def fits(self, step: str, error: ErrorClass) -> bool:
        """Whether the rule applies to an error of this class in this step."""
        return (not self.steps or step in self.steps) and (not self.errors or error in self.errors)


class GraderRetries(Retries):
    """Retries of a grader after a transient error, such as that of a service that it calls."""

    retries: int = Field(5, ge=0, le=50)
    """Retries of a sample. After them it fails, or the whole step fails if samples graded before cannot be graded
    either."""

    errors: tuple[Text, ...] = ("ConnectionError", "TimeoutError", "Timeout", "TransportError", "APIConnectionError")
    """Names of exception classes, with or without their module, that a retry may mend; subclasses are included.
    `cairn.tasks.rewards.grader.TryAgain` is always retried, and so is an exception with an HTTP status of 408, 429 or
    500 to 599."""


class RetryConfig(Retries):
    """Retries of failed steps before the iteration fails. Each class of errors is counted separately."""

    retries: int = Field(3, ge=0, le=50)
    """Retries of a step after a failure that a retry may mend, such as a dead actor or a store that did not respond."""

    rules: tuple[RetryRule, ...] = (RetryRule(errors=("disk",), retries=8, retry_delay_seconds=5.0),)
    """Other values for some steps (`steps`) and some classes of errors (`errors`: `engine_died`, `engine_timeout`,
    `engine`, `store`, `disk`, `grader`), each with its own `retries`, `retry_delay_seconds` and
    `max_retry_delay_seconds`. The first rule that matches applies; if none does, the values above apply."""

    grader: GraderRetries = GraderRetries()
    """Retries of the grading of one sample, within a step."""

    def policy(self, step: str, error: ErrorClass) -> Retries:
        """Return the retries for an error of this class in this step."""
        return next((rule for rule in self.rules if rule.fits(step, error)), self)


class OperationsConfig(Section):
    """Life of a driver among other processes on its machine."""

    grace_period: float = Field(30, gt=0)
    """Seconds that a driver may take to end in an orderly way after SIGTERM or SIGUSR1, or when Ray drains one of its
    machines. It stops its work, saves the weights if there is time, and releases the run. When the seconds are over it
    ends at once. Choose less than the scheduler allows between its notice and SIGKILL."""


class EvalDrop(Section):
    """Fall of a score after which the run waits for approval."""

    benchmark: Text
    """Name of a benchmark in `eval.benchmarks`."""

    drop: float = Field(gt=0)
    """Distance from the best score since a person last approved such a fall. From this distance on the run waits."""


class ApprovalConfig(Section):
    """Points at which a run waits until a person approves it with `cairn approve`. See docs/decisions.md."""

    before: tuple[int, ...] = ()
    """Iterations before which the run waits, from 0."""

    every: int | None = Field(None, ge=1)
    """The run waits before every iteration whose number is a multiple of this, except the first."""

    eval_drop: EvalDrop | None = None
    """The run waits when the score of a benchmark has fallen, before the first iteration that is sampled from the
    weights with that evaluation."""

    wait: bool = True
    """The driver waits, and holds its engines and GPUs. False: it ends in an orderly way with exit code 3, and `cairn
    resume` resumes the run after its approval."""

    @field_validator("before")
    @classmethod
    def _are_iterations(cls, before: tuple[int, ...]) -> tuple[int, ...]:
        if any(iteration < 0 for iteration in before):
            raise ValueError(f"before is {list(before)}: iterations are counted from 0")
        return before


# Alarms and tracking.


class AlarmRule(Section):
    """Condition of an alarm on the mean over the last `window` iterations; no alarm is set by default."""

    below: float | None = None
    """Alarm where the mean is less than this."""

    above: float | None = None
    """Alarm where the mean is more than this."""

    fall: float | None = Field(None, gt=0)
    """Alarm where the mean has fallen by more than this share of the mean over the `window` iterations before; 0.5 is a
    fall by half."""

    rise: float | None = Field(None, gt=0)
    """Alarm where the mean has risen by more than this share of the mean over the `window` iterations before; 1 is a
    doubling."""

    @property
    def is_set(self) -> bool:
        """Whether any condition is set."""
        return self != AlarmRule()


class AlarmsConfig(Section):
    """Alarms for a policy that collapses: a warning at the terminal, metrics under `alarm/`, and events in Prefect."""

    window: int = Field(5, ge=1)
    """Number of iterations that are averaged. An alarm needs this number of iterations; `fall` and `rise` need twice as
    many."""

    entropy: AlarmRule = AlarmRule()
    """Alarm on `train/entropy_loss`: the policy no longer explores."""

    response_length: AlarmRule = AlarmRule()
    """Alarm on `rollout/response_len/mean`: responses become empty or endless."""

    kl: AlarmRule = AlarmRule()
    """Alarm on `train/kl_loss`, or else `rollout/kl`, or else `train/ppo_kl`: the policy moves too far."""

    reward: AlarmRule = AlarmRule()
    """Alarm on `rollout/raw_reward`."""


class TrackingConfig(Section):
    """Services and files that show metrics. See docs/tracking.md."""

    tensorboard_dir: OutputFolder | None = "tensorboard"
    """Local folder for TensorBoard event files, with one sub-folder per run; null writes none."""

    use_wandb: bool = False
    """Show the run in Weights & Biases; the key is read from `WANDB_API_KEY` or `wandb login`. Needs the extra `wandb`.
    slime: `--use-wandb`."""

    wandb_mode: Literal["online", "offline"] = "online"
    """`offline` writes files for `wandb sync`, and needs no network and no key. slime: `--wandb-mode`."""

    wandb_project: Text = "cairn"
    """Name of the W&B project. slime: `--wandb-project`."""

    wandb_group: Text | None = None
    """Group of the run in W&B. slime: `--wandb-group`."""

    wandb_team: str | None = None
    """Team or user that owns the project; by default that of the key. slime: `--wandb-team`."""

    wandb_host: Location | None = None
    """Address of a W&B server of your own. slime: `--wandb-host`."""

    wandb_dir: OutputFolder = "."
    """Local folder in which W&B creates its folder `wandb`. slime: `--wandb-dir`."""

    use_mlflow: bool = False
    """Show the run in MLflow. Needs the extra `mlflow`."""

    mlflow_tracking_uri: Annotated[Location, FromStore.DATABASE] = "sqlite:///mlflow.db"
    """A database, `sqlite:///FILE` or `postgresql://…`, or an MLflow server, `http://host:port`."""

    mlflow_experiment: Text = "cairn"
    """Name of the experiment that holds the run; it is created if it does not exist."""

    prometheus_port: int | None = Field(None, ge=1, le=65535)
    """Port on which the driver serves metrics to Prometheus while it runs, at the path `/metrics`; null opens none."""

    prometheus_host: Location = "127.0.0.1"
    """Address on which this port listens; `0.0.0.0` also allows other machines, without a password."""

    peak_tflops: float | None = Field(None, gt=0)
    """Peak TFLOP/s of one training device in `training.dtype`, for `perf/mfu`; by default the vendor's value for GPUs
    that Cairn knows."""

    alarms: AlarmsConfig = AlarmsConfig()
