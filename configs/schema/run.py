"""The whole configuration of a run, and the rules between its sections."""

from typing import Annotated, Literal

from pydantic import Field

from cairn.configs.kinds import ESTIMATOR
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.base import ModelFolder, Section, ServerUrl, Text, rule
from cairn.configs.schema.data import DataConfig
from cairn.configs.schema.effect import CRITIC, WITH_ENGINES, when
from cairn.configs.schema.evaluation import EvalConfig
from cairn.configs.schema.operations import (
    ApprovalConfig,
    CheckpointConfig,
    FleetConfig,
    OperationsConfig,
    RecoveryConfig,
    RetryConfig,
    TrackingConfig,
)
from cairn.configs.schema.reward import RewardConfig
from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.schema.training import TrainingConfig, warmup_steps

_REFERENCE = when(
    "algorithm.reads_reference",
    because="algorithm.use_kl_loss is false and algorithm.kl_coef is 0",
    remedy="set algorithm.use_kl_loss=true",
)
_TEACHER = when(
    "algorithm.reads_teacher",
    because="algorithm.use_opd is false and algorithm.distillation_loss_coef is 0",
    remedy="set algorithm.use_opd=true",
)
_SERVER = when("model.teacher_url", remedy="set model.teacher_url")


class ModelConfig(Section):
    """The model that is trained."""

    path: ModelFolder
    """Folder of a Hugging Face causal LM with its tokenizer. slime: `--hf-checkpoint`."""

    ref_path: Annotated[ModelFolder | None, _REFERENCE] = None
    """Folder of the reference model for the KL divergence; the initial weights by default. slime: `--ref-load`."""

    teacher_path: Annotated[ModelFolder | None, _TEACHER] = None
    """Folder of the teacher of on-policy distillation, with the same tokenizer. slime: `--opd-teacher-load`."""

    teacher_url: Annotated[ServerUrl | None, _TEACHER] = None
    """Address of a server that holds the teacher, `http://host:30000`, in place of `teacher_path`. The log-probs of
    every token are requested once and stored with the scores. The server's key, if it needs one, is read from the
    environment of the driver, `CAIRN_TEACHER_API_KEY`. slime: `--opd-type`."""

    teacher_name: Annotated[Text | None, _SERVER] = None
    """Name of the teacher at that server, as in its `/v1/models`; the run records it as the teacher's identity."""

    teacher_api: Annotated[Literal["sglang", "openai"], _SERVER] = "sglang"
    """API of the server: `sglang` is SGLang's `/generate`, `openai` the `/v1/completions` of vLLM and others, with
    `echo` and `logprobs`."""

    teacher_timeout: Annotated[float, _SERVER] = Field(600, gt=0)
    """Seconds that the server may take for one sequence; then the request is retried."""

    teacher_concurrency: Annotated[int, _SERVER] = Field(32, ge=1)
    """Number of concurrent requests to the server, of one sequence each."""

    critic_path: Annotated[ModelFolder | None, CRITIC] = None
    """Folder of the critic's initial weights: a causal LM, or a token classifier with one label, whose head becomes the
    value head. `path` by default."""

    @property
    def folders(self) -> dict[str, str]:
        """Folders of all models, by the names of their digests in a run's manifest."""
        paths = {
            "model": self.path,
            "ref_model": self.ref_path,
            "teacher_model": self.teacher_path,
            "critic_model": self.critic_path,
        }
        return {name: path for name, path in paths.items() if path is not None}

    @property
    def has_teacher(self) -> bool:
        """Whether there is a teacher, in the trainer or behind a server."""
        return self.teacher_path is not None or self.teacher_url is not None

    @rule
    def _one_teacher(self) -> None:
        if self.teacher_url is None:
            return
        if self.teacher_path is not None:
            raise ValueError(
                f"teacher_path ({self.teacher_path}) and "
                f"teacher_url ({self.teacher_url}) are two teachers: leave one out"
            )
        if not self.teacher_url.startswith(("http://", "https://")):
            raise ValueError(f"teacher_url ({self.teacher_url}) is not an address such as http://host:30000")
        if not self.teacher_name:
            raise ValueError(
                f"teacher_url ({self.teacher_url}) needs teacher_name, the name of the model there, as "
                "the server reports it at /v1/models"
            )


class RunConfig(Section):
    """Everything that defines a run. It is frozen in the ledger when the run is created."""

    seed: int = Field(42, ge=0)
    """Seed of all random draws of the run. slime: `--rollout-seed`."""

    model: ModelConfig
    data: DataConfig
    rollout: Annotated[RolloutConfig, WITH_ENGINES]
    reward: Annotated[RewardConfig, WITH_ENGINES] = RewardConfig()
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
        """Whether the run tests that an update computes the same bits twice."""
        wanted = self.recovery.self_test
        return self.training.num_gpus_per_rank > 0 if wanted is None else wanted

    @property
    def uses_gpus(self) -> bool:
        """Whether training or rollout engines use GPUs."""
        return self.training.num_gpus_per_rank > 0 or self.rollout.num_gpus_per_engine > 0

    @property
    def samples_responses(self) -> bool:
        """Whether the policy samples the responses on which it is trained."""
        return self.algorithm.learns_from == "responses"

    @property
    def needs_rollout_engines(self) -> bool:
        """Whether anything is sampled, for training or for evaluations."""
        return self.samples_responses or self.eval.eval_interval is not None

    @property
    def group_size(self) -> int:
        """Samples of one row that are trained on together."""
        sizes = {"responses": self.rollout.n_samples_per_prompt, "demonstrations": 1, "preferences": 2}
        return sizes[self.algorithm.learns_from]

    @property
    def samples_per_rollout(self) -> int:
        """Samples trained on per iteration."""
        return self.rollout.rollout_batch_size * self.group_size

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.samples_per_rollout // self.training.num_steps_per_rollout

    @rule
    def _batches_add_up(self) -> None:
        rollout, training = self.rollout, self.training
        made = f"rollout.rollout_batch_size = {rollout.rollout_batch_size}"
        if self.algorithm.learns_from == "preferences":
            made = f"rollout.rollout_batch_size × 2 = {rollout.rollout_batch_size} × 2 = {self.samples_per_rollout}"
        if self.samples_responses:
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
            alone = training.data_parallel_size == training.world_size
            ranks = "world_size" if alone else "world_size, counting only data-parallel ranks"
            raise ValueError(
                f"training.global_batch_size ({self.global_batch_size}) is not divisible by "
                f"training.{ranks} ({training.data_parallel_size})"
            )

    @rule
    def _rounds_can_fill_the_batch(self) -> None:
        first, batch = self.rollout.over_sampling_batch_size, self.rollout.rollout_batch_size
        if first is not None and first < batch:
            raise ValueError(
                f"rollout.over_sampling_batch_size ({first}) is below rollout.rollout_batch_size ({batch}); "
                "it must be at least that"
            )

    @rule
    def _responses_exceed_the_overlong_buffer(self) -> None:
        buffer, longest = self.reward.overlong_buffer_len, self.rollout.rollout_max_response_len
        if self.samples_responses and buffer is not None and buffer > longest:
            raise ValueError(
                f"reward.overlong_buffer_len ({buffer}) is above rollout.rollout_max_response_len ({longest}), so that "
                "an empty response would be penalised; it must be at most that"
            )

    @rule
    def _the_length_penalty_is_learned(self) -> None:
        algorithm = self.algorithm
        shaped = self.reward.overlong_buffer_len is not None and algorithm.advantage_estimator == "gdpo"
        if shaped and not {"reward", "overlong_penalty"} & {*algorithm.gdpo_reward_keys}:
            raise ValueError(
                f"reward.overlong_buffer_len ({self.reward.overlong_buffer_len}) lowers the reward, but "
                "algorithm.gdpo_reward_keys names neither reward nor overlong_penalty, so nothing would learn from it; "
                "name one of them, or leave the buffer out"
            )

    @rule
    def _older_tokens_are_corrected_for(self) -> None:
        rollout = self.rollout
        oldest = rollout.oldest_trained if rollout.draws_surplus else rollout.weights_lag
        if oldest > 0 and not self.algorithm.corrects_for_lag:
            aged = rollout.max_age or rollout.pipeline == "streaming"
            option, value = ("max_age", oldest) if aged else ("lag", rollout.weights_lag)
            leaves = option == "max_age" and rollout.pipeline != "streaming"
            out = "leave rollout.max_age out" if leaves else "set rollout.pipeline=sync"
            raise ValueError(
                f"rollout.{option} is {value}: tokens that older weights sampled are trained on, and nothing corrects "
                "for the difference; set algorithm.use_tis=true or algorithm.use_rollout_logprobs=true, choose a loss "
                f"whose ratio is to the policy that sampled, such as algorithm.loss_type=dppo_tv, or {out}"
            )

    @rule
    def _a_stream_draws_prompts_ahead(self) -> None:
        codes = {"get_samples_path": self.data.get_samples_path, "curriculum.policy": self.data.curriculum.policy}
        for option, code in codes.items():
            if self.rollout.pipeline == "streaming" and code is not None:
                raise ValueError(
                    "rollout.pipeline is streaming, which draws prompts before it has the results of earlier ones, but "
                    f"data.{option} chooses by these: leave it out, or set rollout.pipeline to lagged or sync"
                )

    @rule
    def _a_stream_is_not_forked(self) -> None:
        if self.rollout.pipeline == "streaming" and self.recovery.on_divergence == "fork":
            raise ValueError(
                "recovery.on_divergence is fork, but a run with rollout.pipeline=streaming cannot be forked: set "
                "on_divergence to stop, or rollout.pipeline to lagged or sync"
            )

    @rule
    def _the_store_has_the_weights(self) -> None:
        if self.fleet.update_weight_transport == "store" and self.checkpoint.store_weights is False:
            raise ValueError(
                "fleet.update_weight_transport is store, from which engines read what checkpoint.store_weights writes, "
                "and that is false: leave it out, or choose another transport"
            )

    @rule
    def _gates_can_open(self) -> None:
        approval, total = self.approval, self.rollout.num_rollout
        if total and approval.before and max(approval.before) >= total:
            raise ValueError(
                f"approval.before names iteration {max(approval.before)}, but rollout.num_rollout is {total}: the last "
                f"iteration is {total - 1}"
            )
        fall = approval.eval_drop
        if fall is not None and fall.benchmark not in {benchmark.name for benchmark in self.eval.benchmarks}:
            raise ValueError(
                f"approval.eval_drop.benchmark is {fall.benchmark!r}, which is not one of eval.benchmarks: add it there"
            )
        if fall is not None and self.eval.eval_interval is None:
            raise ValueError("approval.eval_drop needs evaluations: set eval.eval_interval, or leave it out")

    @rule
    def _concurrent_halves_share_no_memory(self) -> None:
        fleet = self.fleet
        shared = [name for name in ("colocate", "offload_train", "offload_rollout") if getattr(fleet, name)]
        if self.rollout.weights_lag and shared:
            raise ValueError(
                f"rollout.pipeline is {self.rollout.pipeline}, which generates while it trains, but with "
                f"fleet.{shared[0]} only one of the two has the memory at a time: set rollout.pipeline=sync, or leave "
                "it out"
            )

    @rule
    def _every_step_has_trained_tokens(self) -> None:
        """Reject batches in which an optimizer step may have no tokens: in a group that was continued some token is
        young enough, but not one of every sample."""
        n, samples = self.rollout.n_samples_per_prompt, self.global_batch_size
        holds_a_group = samples % n == 0 or samples >= 2 * n - 1
        if self.rollout.partial_rollout and not holds_a_group:
            raise ValueError(
                f"rollout.partial_rollout is true and an optimizer step has {samples} samples, which may all be of one "
                f"group of {n} and finished too long ago to be trained on (rollout.max_age): make "
                "training.global_batch_size a multiple of rollout.n_samples_per_prompt"
            )

    @rule
    def _groups_can_be_normalised(self) -> None:
        algorithm, n = self.algorithm, self.rollout.n_samples_per_prompt
        if not self.samples_responses:
            return
        if n == 1 and algorithm.advantage_estimator in ("rloo", "gdpo"):
            raise ValueError(
                f"algorithm.advantage_estimator is {algorithm.advantage_estimator} but rollout.n_samples_per_prompt is "
                "1: a sample is compared with the others of its group, but it has none; raise n_samples_per_prompt"
            )
        if n > 1 or not algorithm.rewards_normalization or algorithm.loss_type == "forward_kl_topk":
            return  # that loss reads no advantages
        estimator = ESTIMATOR.built_in_declaration(algorithm.advantage_estimator)
        if estimator is not None and "rewards_normalization" in estimator.reads:
            raise ValueError(
                "algorithm.rewards_normalization is true but rollout.n_samples_per_prompt is 1: every advantage would "
                "be zero; raise n_samples_per_prompt or set rewards_normalization=false"
            )

    @rule
    def _ratios_can_be_clipped(self) -> None:
        algorithm, training = self.algorithm, self.training
        if training.num_steps_per_rollout > 1:
            return
        if algorithm.use_rollout_logprobs or algorithm.ratio_to_behaviour:  # the ratio is to another policy
            return
        if algorithm.loss_type == "kl_cov":
            raise ValueError(
                "algorithm.loss_type (kl_cov) has no effect while training.num_steps_per_rollout is 1: it penalises "
                "how far tokens have moved from the policy before the update, which is 0 in the only step; raise "
                "num_steps_per_rollout, or choose clip_cov"
            )

    @rule
    def _the_learning_rate_falls_within_the_run(self) -> None:
        training, fall = self.training, self.training.lr_wsd_decay_iters
        total = self.rollout.num_rollout * training.num_steps_per_rollout
        if fall is None or training.lr_decay_style != "WSD" or training.lr_decay_iters is not None or total == 0:
            return
        if fall > total - warmup_steps(training, total):
            raise ValueError(
                f"training.lr_wsd_decay_iters ({fall}) leaves fewer of the run's {total} optimizer steps than the "
                "warm-up takes: lower it"
            )

    @rule
    def _responses_and_pairs_fit(self) -> None:
        if self.samples_responses and self.rollout.rollout_max_response_len < 1:
            raise ValueError("rollout.rollout_max_response_len is missing: set it to the longest response in tokens")
        steps = self.training.num_steps_per_rollout
        if self.algorithm.learns_from == "preferences" and steps > 1:
            raise ValueError(
                f"training.num_steps_per_rollout is {steps}, but dpo computes the weights of pairs from the policy "
                "before the update, so that an iteration must be one optimizer step: set it to 1, and "
                "rollout.rollout_batch_size to the pairs of a step"
            )

    @rule
    def _reference_can_be_updated(self) -> None:
        if self.algorithm.ref_update_interval is not None and self.training.lora.r:
            raise ValueError(
                f"algorithm.ref_update_interval is {self.algorithm.ref_update_interval}, but with training.lora.r the "
                "reference is the model without adapters: train all weights, or leave the interval out"
            )

    @rule
    def _teacher_is_there_and_used(self) -> None:
        model, rollout = self.model, self.rollout
        algorithm = self.algorithm
        readers = {
            "use_opd": algorithm.use_opd,
            "distillation_loss_coef": algorithm.distillation_loss_coef > 0,
            "loss_type=forward_kl_topk": algorithm.learns_from_top_k,
        }
        reader = next((name for name, reads in readers.items() if reads), None)
        if reader is not None and not model.has_teacher:
            raise ValueError(
                f"algorithm.{reader} needs a teacher: set model.teacher_path to its folder, or model.teacher_url"
            )
        if algorithm.learns_from_top_k and model.teacher_url is not None and model.teacher_api != "sglang":
            raise ValueError(
                f"model.teacher_api ({model.teacher_api}) gives no log-probs of the most probable tokens, which "
                "algorithm.distillation_topk needs: use an SGLang server, or model.teacher_path"
            )
        if model.teacher_url is not None and (rollout.rollout_temperature != 1 or rollout.cuts_vocabulary):
            raise ValueError(
                f"model.teacher_url ({model.teacher_url}) gives log-probs at temperature 1 over the whole vocabulary, "
                "but the policy samples with other settings: leave out rollout.rollout_temperature, rollout_top_p and "
                "rollout_top_k, or use model.teacher_path"
            )

    @rule
    def _the_actor_is_trained(self) -> None:
        critic_only = self.algorithm.num_critic_only_steps
        if 0 < self.rollout.num_rollout <= critic_only:
            raise ValueError(
                f"algorithm.num_critic_only_steps ({critic_only}) must be below "
                f"rollout.num_rollout ({self.rollout.num_rollout}): the actor would never be trained"
            )
