"""Where a run keeps things and how it holds its workers: nothing here changes what is computed."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from cairn.configs.schema.base import Location, Section


class CheckpointConfig(Section):
    """Restore points."""

    save_interval: int | None = Field(None, ge=1)
    """Iterations between checkpoints; the last iteration always has one. Null keeps only that one, and recovery
    replays the committed steps from the initial weights. slime: `--save-interval`."""

    save_retain_interval: int | None = Field(None, ge=1)
    """Of the checkpoints before the newest, keep those of every so many iterations, a multiple of `save_interval`, and
    remove the files of the others. Null keeps all. Megatron: `--save-retain-interval`."""

    retain_snapshots: int | None = Field(None, ge=2)
    """Newest iterations whose samples and other snapshot files are kept; those that recovery would read are kept too.
    Commits, with all metrics and digests, stay. Null keeps the files for ever."""

    @model_validator(mode="after")
    def _recovery_keeps_what_it_needs(self) -> "CheckpointConfig":
        for name in ("save_retain_interval", "retain_snapshots"):
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
        return self


class FleetConfig(Section):
    """The Ray cluster and its actors."""

    ray_address: Location | None = None
    """Cluster to join: `auto` for the one on this machine, or `host:port`; null starts one that ends with the run."""

    num_cpus_per_engine: float = Field(1, ge=0)
    """CPUs reserved in the placement group for each rollout engine."""

    num_cpus_per_rank: float = Field(1, ge=0)
    """CPUs reserved in the placement group for each training rank."""

    num_cpus_per_episode_worker: float = Field(0, ge=0)
    """CPUs reserved in the placement group for each of `rollout.num_episode_workers`."""

    start_timeout: float = Field(600, gt=0)
    """Seconds that placement and start of all actors, model loading included, may take."""

    call_timeout: float = Field(120, gt=0)
    """Seconds that a short actor call (health, versions, one bucket of weights) may take."""

    colocate: bool = False
    """Training and rollout share GPUs, in turn, in one placement group. slime: `--colocate`."""

    offload_train: bool | None = None
    """The training engine gives its GPU memory away while others use the GPUs; by default where `colocate` is set.
    slime: `--offload-train`."""

    offload_rollout: bool | None = None
    """The rollout engines give their GPU memory away while training uses the GPUs; by default where `colocate` is set.
    slime: `--offload-rollout`."""

    update_weight_transport: Literal["tensor", "disk", "distributed"] = "tensor"
    """How weights travel to the rollout engines: `tensor` in buckets through Ray's object store and the memory that an
    engine shares with its server, `disk` as a model folder that the engines load, `distributed` in buckets that the
    trainer broadcasts to the servers, over gloo on CPUs and NCCL between GPUs. slime: `--update-weight-transport`."""

    update_weight_buffer_size: int = Field(512 * 1024**2, ge=1)
    """Bytes of a bucket when weights travel to the rollout engines. slime: `--update-weight-buffer-size`."""

    update_weight_disk_dir: Location | None = None
    """Folder for the transport `disk`, the same on every machine of the fleet. slime: `--update-weight-disk-dir`."""

    update_weight_disk_keep_files: bool = False
    """Keep the model folder of every version there, not of the last ones alone. slime:
    `--update-weight-disk-keep-files`."""

    check_weight_update_equal: bool = False
    """After every update compare the log-probs of a small batch with the trainer's where the engine gives no checksum
    of its weights; the checksum of one that does is compared always. slime: `--check-weight-update-equal`."""

    @property
    def offloads_train(self) -> bool:
        """Whether the training engine gives its memory away."""
        return self.colocate if self.offload_train is None else self.offload_train

    @property
    def offloads_rollout(self) -> bool:
        """Whether the rollout engines give their memory away."""
        return self.colocate if self.offload_rollout is None else self.offload_rollout

    @model_validator(mode="after")
    def _who_is_compared_is_awake(self) -> "FleetConfig":
        if self.check_weight_update_equal and self.offloads_train:
            raise ValueError(
                "check_weight_update_equal (true) asks the training engine for log-probs or a checksum after an "
                "update, when offload_train has taken its memory: set one of them to false"
            )
        return self

    @model_validator(mode="after")
    def _the_disk_has_a_folder(self) -> "FleetConfig":
        if (self.update_weight_transport == "disk") != (self.update_weight_disk_dir is not None):
            raise ValueError(
                f"update_weight_transport is {self.update_weight_transport} and update_weight_disk_dir is "
                f"{self.update_weight_disk_dir}: the transport disk needs a folder, and no other transport reads it"
            )
        return self


class RecoveryConfig(Section):
    """What is done about weights that replay does not bring back bit for bit."""

    on_divergence: Literal["stop", "fork"] = "stop"
    """When a committed train step, done again, gives another state than was committed: `stop` the run and name both
    digests, or `fork` it at its newest checkpoint, which needs no replay, and let the same driver go on with the fork.
    The run stays as it is, and the fork's manifest says why there is one."""

    self_test: bool | None = None
    """Once on each kind of machine, after an iteration: do one update twice from the same state, across a restart of
    the training engine, and record in the store whether the bits agree. By default where training has GPUs."""


StepName = Literal["rollout", "reward", "filter", "score", "advantage", "train", "checkpoint", "sync", "eval"]

ErrorClass = Literal["engine_died", "engine_timeout", "engine", "store", "disk", "grader"]
"""`engine_died`: the process of an engine is gone. `engine_timeout`: it did not answer in time. `engine`: any other
failure of an engine that a new try can mend. `store`: it did not answer, or not rightly. `disk`: no space is left.
`grader`: the machine did not let a grader work, or nothing that it asked answered."""


class Retries(Section):
    """How often something is tried again, and after which waits."""

    retries: int = Field(3, ge=0, le=50)
    """Further tries."""

    retry_delay_seconds: float = Field(1.0, ge=0)
    """Wait before the first of them; it doubles with each."""

    max_retry_delay_seconds: float = Field(60.0, ge=0)
    """The longest wait."""

    def delays(self) -> list[float]:
        """Seconds before each new try."""
        longest = max(self.max_retry_delay_seconds, self.retry_delay_seconds)
        return [min(longest, self.retry_delay_seconds * 2.0**attempt) for attempt in range(self.retries)]


class RetryRule(Retries):
    """Retries of some steps, or after some errors."""

    steps: tuple[StepName, ...] = ()
    """The steps that it is for; empty: all."""

    errors: tuple[ErrorClass, ...] = ()
    """The classes of errors that it is for; empty: all."""

    def fits(self, step: str, error: ErrorClass) -> bool:
        """Whether it is for an error of this class in this step."""
        return (not self.steps or step in self.steps) and (not self.errors or error in self.errors)


class GraderRetries(Retries):
    """When a grader raises something that may pass, such as the error of a service that it asks."""

    retries: int = Field(5, ge=0, le=50)
    """Further tries of a sample; then it fails, or the whole step if what was graded before cannot be graded either."""

    errors: tuple[str, ...] = ("ConnectionError", "TimeoutError", "Timeout", "TransportError", "APIConnectionError")
    """Names of exception classes, with or without their module, that a new try may mend; subclasses are meant too.
    `cairn.tasks.rewards.grader.TryAgain` always is, and so is an exception with an HTTP status of 408, 429 or 500 to
    599."""


class RetryConfig(Retries):
    """How often what failed is tried again before the iteration fails. Each class of errors is counted by itself."""

    retries: int = Field(3, ge=0, le=50)
    """Further tries of a step after a failure that a new try can mend, such as a dead actor or a store that did not
    answer."""

    rules: tuple[RetryRule, ...] = (RetryRule(errors=("disk",), retries=8, retry_delay_seconds=5.0),)
    """Other numbers for some steps (`steps`) and some classes of errors (`errors`: `engine_died`, `engine_timeout`,
    `engine`, `store`, `disk`, `grader`), each with its `retries`, `retry_delay_seconds` and `max_retry_delay_seconds`.
    The first rule that fits counts; where none does, the numbers above."""

    grader: GraderRetries = GraderRetries()
    """Of one sample, within a step."""

    def policy(self, step: str, error: ErrorClass) -> Retries:
        """For an error of this class in this step."""
        return next((rule for rule in self.rules if rule.fits(step, error)), self)


class OperationsConfig(Section):
    """How a driver lives and ends among others on its machine."""

    grace_period: float = Field(30, gt=0)
    """Seconds that a driver may take to end in order when it is told to (SIGTERM, SIGUSR1, or Ray drains a machine of
    it): it stops its work, saves the weights where that fits in, and gives the run back. At their end it ends at once.
    Less than what the scheduler leaves between its notice and SIGKILL."""


class EvalDrop(Section):
    """How far a score may fall before somebody is asked."""

    benchmark: str
    """Name of one of `eval.benchmarks`."""

    drop: float = Field(gt=0)
    """Distance from the best score since a person last approved such a fall, from which on the run waits."""


class ApprovalConfig(Section):
    """Where a run waits until a person lets it go on: `cairn approve`. See docs/decisions.md."""

    before: tuple[int, ...] = ()
    """Iterations before which it waits, from 0."""

    every: int | None = Field(None, ge=1)
    """It waits before every iteration whose number is a multiple of this, but for the first."""

    eval_drop: EvalDrop | None = None
    """It waits when the score of a benchmark has fallen: before the first iteration that is sampled from weights with
    that evaluation."""

    wait: bool = True
    """The driver waits, and keeps its engines and GPUs; false ends it in order, with exit code 3, and `cairn resume`
    goes on when the run is approved."""

    @field_validator("before")
    @classmethod
    def _are_iterations(cls, before: tuple[int, ...]) -> tuple[int, ...]:
        if any(iteration < 0 for iteration in before):
            raise ValueError(f"before is {list(before)}: iterations are counted from 0")
        return before


# Who is told of a run and how: nothing here changes what is computed.


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
