"""The whole configuration of a run, and the rules between its sections."""

from pydantic import Field, ValidationInfo, model_validator

from cairn.configs.kinds import ESTIMATOR, LOSS
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.base import Section, is_recorded
from cairn.configs.schema.data import DataConfig
from cairn.configs.schema.evaluation import EvalConfig
from cairn.configs.schema.operations import (
    ApprovalConfig,
    CheckpointConfig,
    FleetConfig,
    OperationsConfig,
    RecoveryConfig,
    RetryConfig,
)
from cairn.configs.schema.reward import RewardConfig
from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.schema.tracking import TrackingConfig
from cairn.configs.schema.training import TrainingConfig


class ModelConfig(Section):
    """The model that is trained."""

    path: str
    """Folder of a Hugging Face causal LM with its tokenizer. slime: `--hf-checkpoint`."""

    ref_path: str | None = None
    """Folder of the reference model for the KL divergence; the initial weights by default. slime: `--ref-load`."""

    teacher_path: str | None = None
    """Folder of the teacher of on-policy distillation, of the same tokenizer. slime: `--opd-teacher-load`."""

    critic_path: str | None = None
    """Folder that the critic starts from, a causal LM or a token classifier with one label, whose head is then the
    value head; `path` by default. slime: `--critic-load`."""

    @property
    def folders(self) -> dict[str, str]:
        """The folders of all models, by the names of their digests in a run's manifest."""
        found = {
            "model": self.path,
            "ref_model": self.ref_path,
            "teacher_model": self.teacher_path,
            "critic_model": self.critic_path,
        }
        return {name: path for name, path in found.items() if path is not None}


class RunConfig(Section):
    """Everything that defines a run. Frozen in the ledger when the run is created."""

    seed: int = Field(42, ge=0)
    """Every random draw of the run comes from it. slime: `--rollout-seed`."""

    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    fleet: FleetConfig = FleetConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    retry: RetryConfig = RetryConfig()
    tracking: TrackingConfig = TrackingConfig()
    operations: OperationsConfig = OperationsConfig()
    approval: ApprovalConfig = ApprovalConfig()

    @property
    def self_tests(self) -> bool:
        """Whether it is tried that updates give the same bits twice."""
        wanted = self.recovery.self_test
        return self.training.num_gpus_per_rank > 0 if wanted is None else wanted

    @property
    def samples_per_rollout(self) -> int:
        """Samples trained on per iteration."""
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.samples_per_rollout // self.training.num_steps_per_rollout

    @model_validator(mode="after")
    def _batches_add_up(self) -> "RunConfig":
        rollout, training = self.rollout, self.training
        made = (
            f"rollout.rollout_batch_size × rollout.n_samples_per_prompt = "
            f"{rollout.rollout_batch_size} × {rollout.n_samples_per_prompt} = {self.samples_per_rollout}"
        )
        steps = training.num_steps_per_rollout
        if training.global_batch_size is None:
            if self.samples_per_rollout % steps:
                raise ValueError(f"{made} is not divisible by training.num_steps_per_rollout = {steps}")
        elif self.samples_per_rollout != training.global_batch_size * steps:
            raise ValueError(
                f"{made}, but training.global_batch_size × training.num_steps_per_rollout = "
                f"{training.global_batch_size} × {steps} = {training.global_batch_size * steps}; the two must be equal"
            )
        if self.global_batch_size % training.data_parallel_size:
            ranks = "world_size" if training.engine == "torch" else "world_size, as far as its ranks differ in samples"
            raise ValueError(
                f"training.global_batch_size ({self.global_batch_size}) is not divisible by "
                f"training.{ranks} ({training.data_parallel_size})"
            )
        return self

    @model_validator(mode="after")
    def _rounds_can_fill_the_batch(self) -> "RunConfig":
        first, batch = self.rollout.over_sampling_batch_size, self.rollout.rollout_batch_size
        if first is not None and first < batch:
            raise ValueError(
                f"rollout.over_sampling_batch_size ({first}) is below rollout.rollout_batch_size ({batch}); "
                "it must be at least that"
            )
        return self

    @model_validator(mode="after")
    def _older_tokens_are_corrected_for(self) -> "RunConfig":
        corrects = self.algorithm.use_tis or self.algorithm.use_rollout_logprobs
        rollout = self.rollout
        if rollout.oldest_trained > 0 and not corrects:
            option, value = ("max_age", rollout.max_age) if rollout.max_age else ("lag", rollout.weights_lag)
            out = "leave rollout.max_age out" if option == "max_age" else "set rollout.pipeline=sync"
            raise ValueError(
                f"rollout.{option} is {value}: tokens that older weights sampled are trained on, and nothing corrects "
                f"for the difference; set algorithm.use_tis=true or algorithm.use_rollout_logprobs=true, or {out}"
            )
        return self

    @model_validator(mode="after")
    def _what_is_asked_about_happens(self) -> "RunConfig":
        approval, total = self.approval, self.rollout.num_rollout
        if approval.before and max(approval.before) >= total:
            raise ValueError(
                f"approval.before names iteration {max(approval.before)}, but rollout.num_rollout is {total}: the last "
                f"iteration is {total - 1}"
            )
        fall = approval.eval_drop
        if fall is not None and fall.benchmark not in {benchmark.name for benchmark in self.eval.benchmarks}:
            raise ValueError(
                f"approval.eval_drop.benchmark is {fall.benchmark!r}, which is none of eval.benchmarks: nothing would "
                "ever fall"
            )
        if fall is not None and self.eval.eval_interval is None:
            raise ValueError("approval.eval_drop needs evaluations: set eval.eval_interval, or leave it out")
        return self

    @model_validator(mode="after")
    def _what_runs_side_by_side_shares_no_memory(self) -> "RunConfig":
        fleet = self.fleet
        shared = [name for name in ("colocate", "offload_train", "offload_rollout") if getattr(fleet, name)]
        if self.rollout.weights_lag and shared:
            raise ValueError(
                f"rollout.pipeline is lagged, which generates while it trains, but with fleet.{shared[0]} only one of "
                "the two has the memory at a time: set rollout.pipeline=sync, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _every_step_has_tokens_to_train_on(self, info: ValidationInfo) -> "RunConfig":
        """Of a group that was continued, some token is young enough, but not one of every sample."""
        n, samples = self.rollout.n_samples_per_prompt, self.global_batch_size
        holds_a_group = samples % n == 0 or samples >= 2 * n - 1
        if self.rollout.partial_rollout and not holds_a_group and not is_recorded(info):
            raise ValueError(
                f"rollout.partial_rollout is true and an optimizer step has {samples} samples, which may all be of one "
                f"group of {n} and finished too long ago to be trained on (rollout.max_age): make "
                "training.global_batch_size a multiple of rollout.n_samples_per_prompt"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_normalised(self) -> "RunConfig":
        algorithm, n = self.algorithm, self.rollout.n_samples_per_prompt
        if n > 1 or not algorithm.rewards_normalization:
            return self
        ours = ESTIMATOR.declaration_of_ours(algorithm.advantage_estimator)
        if ours is not None and "rewards_normalization" in ours.reads:
            raise ValueError(
                "algorithm.rewards_normalization is true but rollout.n_samples_per_prompt is 1: every advantage would "
                "be zero; raise n_samples_per_prompt or set rewards_normalization=false"
            )
        return self

    @model_validator(mode="after")
    def _ratios_can_be_clipped(self, info: ValidationInfo) -> "RunConfig":
        algorithm, training = self.algorithm, self.training
        if is_recorded(info) or algorithm.use_rollout_logprobs or training.num_steps_per_rollout > 1:
            return self
        for name in ("eps_clip", "eps_clip_high", "eps_clip_c"):
            value = getattr(algorithm, name)
            if value != type(algorithm).model_fields[name].default:
                raise ValueError(
                    f"algorithm.{name} ({value}) has no effect while training.num_steps_per_rollout is 1 and "
                    "algorithm.use_rollout_logprobs is false: the policy that is trained is the one that ratios are "
                    "taken against; change either, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _samples_are_trained_on(self) -> "RunConfig":
        loss = LOSS.declaration_of_ours(self.algorithm.loss_type) if self.algorithm.names_a_loss else None
        if loss is not None and "advantages" not in loss.needs:
            raise ValueError(
                f"algorithm.loss_type is {self.algorithm.loss_type}, which learns from demonstrations, and a run has "
                "none: leave it out, or train with the engine itself as examples/quickstart/warm_start.py does"
            )
        return self

    @model_validator(mode="after")
    def _reference_is_used(self) -> "RunConfig":
        algorithm = self.algorithm
        if self.model.ref_path is not None and not algorithm.reads_kl and not algorithm.names_user_code:
            raise ValueError(
                f"model.ref_path ({self.model.ref_path}) is set but algorithm.use_kl_loss is false and "
                "algorithm.kl_coef is 0; nothing would read it"
            )
        return self

    @model_validator(mode="after")
    def _teacher_is_there_and_used(self) -> "RunConfig":
        if self.algorithm.use_opd and self.model.teacher_path is None:
            raise ValueError("algorithm.use_opd needs a teacher: set model.teacher_path to its folder")
        if self.model.teacher_path is not None and not self.algorithm.use_opd and not self.algorithm.names_user_code:
            raise ValueError(
                f"model.teacher_path ({self.model.teacher_path}) is set but algorithm.use_opd is false; nothing would "
                "read it"
            )
        return self

    @model_validator(mode="after")
    def _critic_is_used(self) -> "RunConfig":
        algorithm, training = self.algorithm, self.training
        critics = {
            "model.critic_path": self.model.critic_path,
            "training.critic_lr": training.critic_lr,
            "training.critic_lr_warmup_iters": training.critic_lr_warmup_iters,
        }
        estimator = ESTIMATOR.declaration_of_ours(algorithm.advantage_estimator) if any(critics.values()) else None
        for name, value in critics.items():
            if value and estimator is not None and "values" not in estimator.needs and "." not in algorithm.loss_type:
                raise ValueError(
                    f"{name} ({value}) is set but algorithm.advantage_estimator is {algorithm.advantage_estimator}, "
                    "which has no critic; nothing would read it"
                )
        if algorithm.num_critic_only_steps >= self.rollout.num_rollout:
            raise ValueError(
                f"algorithm.num_critic_only_steps ({algorithm.num_critic_only_steps}) must be below "
                f"rollout.num_rollout ({self.rollout.num_rollout}): the actor would never be trained"
            )
        return self
