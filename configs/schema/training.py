"""Options of the training engine, its optimizer and its batches."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from cairn.configs.schema.base import EngineOptions, Section, Text, Variables, rule
from cairn.configs.schema.effect import CRITIC, When, read, when

# Schedules of learning rate and weight decay, by Megatron's names, and the rules for their options.


DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WSDStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
IncreaseStyle = Literal["constant", "linear", "cosine"]


def warmup_steps(config: "TrainingConfig", total_steps: int) -> float:
    """Return the number of optimizer steps of the warm-up; with `lr_warmup_fraction` it may be fractional."""
    if config.lr_warmup_fraction is not None:
        return config.lr_warmup_fraction * (config.lr_decay_iters or total_steps)
    return config.lr_warmup_iters


def schedule_problem(config: "TrainingConfig") -> str | None:
    """Return a sentence on schedule options that contradict each other; None where there are none."""
    if config.lr_warmup_fraction is not None and config.lr_warmup_iters:
        return (
            f"lr_warmup_fraction ({config.lr_warmup_fraction}) and lr_warmup_iters ({config.lr_warmup_iters}) exclude "
            "each other: both set the length of the warm-up; leave one of them out"
        )
    if config.warms_up and config.lr_warmup_init > config.lr:
        return f"lr_warmup_init ({config.lr_warmup_init}) is above lr ({config.lr}), where the warm-up ends"
    return _decay_problem(config) or _weight_decay_problem(config)


def _decay_problem(config: "TrainingConfig") -> str | None:
    style, last = config.lr_decay_style, config.lr_wsd_decay_iters
    if style != "WSD":
        return None
    if last is None:
        return "lr_decay_style is WSD, which needs lr_wsd_decay_iters: the optimizer steps of the decay at the end"
    if config.lr_decay_iters is not None and last > config.lr_decay_iters - warmup_steps(config, 0):
        return (
            f"lr_wsd_decay_iters ({last}) leaves fewer of lr_decay_iters ({config.lr_decay_iters}) than the warm-up "
            "takes: lower it"
        )
    return None


def _weight_decay_problem(config: "TrainingConfig") -> str | None:
    style, start, end = config.weight_decay_incr_style, config.start_weight_decay, config.end_weight_decay
    if style == "constant":
        return None
    if start is None or end is None:
        return f"weight_decay_incr_style is {style}, which needs start_weight_decay and end_weight_decay: set both"
    if end < start:
        return f"end_weight_decay ({end}) is below start_weight_decay ({start}): weight decay only rises"
    return None


def _schedule(prefix: str, of: str) -> dict[str, When]:
    """Return the conditions of the schedules' options in `training`, or in `training.critic`, which takes over what it
    leaves out."""
    iters = "training.critic_lr_warmup_iters" if "critic" in prefix else "training.lr_warmup_iters"
    return {
        "warm_up": when(f"{of}.warms_up", because="there is no warm-up", remedy=f"set {iters}"),
        "wsd": When(
            lambda run: read(run, f"{of}.lr_decay_style") == "WSD",
            lambda run: f"{prefix}.lr_decay_style is {read(run, f'{of}.lr_decay_style')}",
            f"set {prefix}.lr_decay_style=WSD",
        ),
        "rising": When(
            lambda run: read(run, f"{of}.weight_decay_incr_style") != "constant",
            lambda run: f"{prefix}.weight_decay_incr_style is constant",
            f"set {prefix}.weight_decay_incr_style=linear",
        ),
        "steady": When(
            lambda run: read(run, f"{of}.weight_decay_incr_style") == "constant",
            lambda run: (
                f"{prefix}.weight_decay_incr_style is {read(run, f'{of}.weight_decay_incr_style')}, which goes "
                "from start_weight_decay to end_weight_decay"
            ),
            "leave that out",
        ),
    }


_OWN, _OF_CRITIC = _schedule("training", "training"), _schedule("training.critic", "training.of_critic")


class CriticConfig(Section):
    """Options of the critic that differ from those of the same name in `training`. Where one is null, that of
    `training` applies. The critic's learning rate is `critic_lr`, its warm-up `critic_lr_warmup_iters`. slime: the
    entry of the role `critic` in the file of `--megatron-config-path`."""

    min_lr: float | None = Field(None, ge=0)
    """`training.min_lr` of the critic."""

    lr_warmup_init: Annotated[float | None, _OF_CRITIC["warm_up"]] = Field(None, ge=0)
    """`training.lr_warmup_init` of the critic."""

    lr_decay_style: DecayStyle | None = None
    """`training.lr_decay_style` of the critic."""

    lr_decay_iters: int | None = Field(None, ge=1)
    """`training.lr_decay_iters` of the critic, in its own optimizer steps."""

    lr_wsd_decay_style: Annotated[WSDStyle | None, _OF_CRITIC["wsd"]] = None
    """`training.lr_wsd_decay_style` of the critic."""

    lr_wsd_decay_iters: Annotated[int | None, _OF_CRITIC["wsd"]] = Field(None, ge=1)
    """`training.lr_wsd_decay_iters` of the critic."""

    weight_decay: Annotated[float | None, _OF_CRITIC["steady"]] = Field(None, ge=0)
    """`training.weight_decay` of the critic."""

    weight_decay_incr_style: IncreaseStyle | None = None
    """`training.weight_decay_incr_style` of the critic."""

    start_weight_decay: Annotated[float | None, _OF_CRITIC["rising"]] = Field(None, ge=0)
    """`training.start_weight_decay` of the critic."""

    end_weight_decay: Annotated[float | None, _OF_CRITIC["rising"]] = Field(None, ge=0)
    """`training.end_weight_decay` of the critic."""

    adam_beta1: float | None = Field(None, ge=0, lt=1)
    """`training.adam_beta1` of the critic."""

    adam_beta2: float | None = Field(None, ge=0, lt=1)
    """`training.adam_beta2` of the critic."""

    adam_eps: float | None = Field(None, gt=0)
    """`training.adam_eps` of the critic."""

    clip_grad: float | None = Field(None, ge=0)
    """`training.clip_grad` of the critic."""

    @property
    def own(self) -> dict[str, object]:
        """The options that are set."""
        return {name: value for name, value in self if value is not None}


class LoraConfig(Section):
    """Low-rank adapters that are trained in place of all weights; names as in peft's `LoraConfig`. Engine torch
    only."""

    r: int = Field(0, ge=0)
    """Rank of the adapters; 0 trains all weights without adapters."""

    lora_alpha: int = Field(8, ge=1)
    """Numerator of the adapters' scale, lora_alpha / r."""

    use_rslora: bool = False
    """Scale adapters by lora_alpha / sqrt(r) instead."""

    target_modules: Literal["all-linear"] | list[Text] = "all-linear"
    """Linear layers that get an adapter, by their names in the model or the last parts of these: `[q_proj, v_proj]`.
    `all-linear` takes all but the output layer."""

    @field_validator("target_modules")
    @classmethod
    def _some(cls, names: str | list[str]) -> str | list[str]:
        if not names:
            raise ValueError("is empty: leave it out for all-linear, or name the layers that get an adapter")
        return names


class TrainingConfig(Section):
    """Training engine, optimizer and batches."""

    engine: Literal["torch", "megatron"] = "torch"
    """The training engine. `torch`: trains any Hugging Face causal LM, with FSDP2 over more than one rank; `fsdp` is
    another name of it. `megatron`: trains the model families that it has a mapping for, with every parallelism of
    megatron-core. slime: `--train-backend`."""

    megatron: EngineOptions = Field(default_factory=dict)
    """Options of megatron-core under their own names, those of `TransformerConfig`, `DistributedDataParallelConfig` and
    `OptimizerConfig`: `tensor_model_parallel_size: 2`. An unknown name is an error."""

    world_size: int = Field(1, ge=1)
    """Number of training ranks, one Ray actor each. slime: `--actor-num-nodes` × `--actor-num-gpus-per-node`."""

    num_gpus_per_rank: float = Field(0, ge=0)
    """GPUs reserved for each rank; 0 trains on the CPU over gloo."""

    num_threads: int = Field(2, ge=1)
    """CPU threads of a rank."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of forward and backward; master weights and optimizer state stay float32. Megatron: `--bf16`."""

    deterministic_mode: bool = True
    """On GPUs, compute the same bits every time, because replay after a failure compares with the committed digests.
    This selects deterministic kernels, collectives and attention, and sets the environment that cuBLAS, NCCL,
    Transformer Engine and FlashAttention read. False is faster, but a replay may then diverge, see
    `recovery.on_divergence`. No effect on CPUs. Megatron: `--deterministic-mode`."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. Megatron: `--recompute-granularity full`. `recompute_activations` is
    another name of it for engine `torch`, and for engine `megatron` of `megatron: {recompute_granularity:
    selective}`."""

    fsdp_cpu_offload: Annotated[bool, when("training.engine", "torch")] = False
    """Hold weights, gradients and moments in the host's memory, divided over the ranks, and update them there. GPUs
    hold the weights of one layer at a time, and activations."""

    sequence_packing: Annotated[bool, when("training.engine", "torch")] = False
    """Put the samples of a micro-batch one after the other into one row, without padding, in place of a padded row
    each. Megatron always does."""

    context_parallel_size: Annotated[int, when("training.engine", "torch")] = Field(1, ge=1)
    """Ranks that share each sequence, in consecutive parts; above 1, samples are packed. For engine `megatron` it is
    another name of `megatron: {context_parallel_size: …}`. Megatron: `--context-parallel-size`."""

    global_batch_size: int | None = Field(None, ge=1)
    """Samples per optimizer step; by default the number that follows from `num_steps_per_rollout`. Megatron:
    `--global-batch-size`."""

    num_steps_per_rollout: int = Field(1, ge=1)
    """Optimizer steps per iteration. slime: `--num-steps-per-rollout`."""

    max_tokens_per_gpu: int | None = Field(None, ge=1)
    """Largest number of tokens in a micro-batch, including padding; a longer sample forms a micro-batch of its own.
    Null means one micro-batch. slime: `--max-tokens-per-gpu`."""

    micro_batch_size: int | None = Field(None, ge=1)
    """Largest number of samples in a micro-batch, whatever their length. The alternative is `max_tokens_per_gpu`, whose
    micro-batches are equally full. Megatron: `--micro-batch-size`."""

    optimizer: Literal["adam"] = "adam"
    """The optimizer; `adam` is AdamW. Megatron: `--optimizer`."""

    lr: float = Field(1e-6, gt=0)
    """Learning rate. Megatron: `--lr`."""

    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the decay. Megatron: `--min-lr`."""

    lr_decay_style: DecayStyle = "constant"
    """Shape of the learning rate's decay after the warm-up; `WSD` (warm-up, stable, decay) decays only at the end.
    Megatron: `--lr-decay-style`."""

    lr_warmup_iters: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up from `lr_warmup_init`. Megatron: `--lr-warmup-iters`."""

    lr_warmup_fraction: float | None = Field(None, ge=0, lt=1)
    """Length of the warm-up as a share of the decay's steps, in place of `lr_warmup_iters`. Megatron:
    `--lr-warmup-fraction`."""

    lr_warmup_init: Annotated[float, _OWN["warm_up"]] = Field(0.0, ge=0)
    """Learning rate at the start of the warm-up. Megatron: `--lr-warmup-init`."""

    lr_decay_iters: int | None = Field(None, ge=1)
    """Optimizer steps until `min_lr`, including the warm-up; by default the whole run. Megatron: `--lr-decay-iters`."""

    lr_wsd_decay_style: Annotated[WSDStyle | None, _OWN["wsd"]] = None
    """Shape of the decay of `WSD`; `exponential` by default. Megatron: `--lr-wsd-decay-style`."""

    lr_wsd_decay_iters: Annotated[int | None, _OWN["wsd"]] = Field(None, ge=1)
    """`WSD`: optimizer steps of its decay, the last of `lr_decay_iters`. Megatron: `--lr-wsd-decay-iters`."""

    critic_lr: Annotated[float | None, CRITIC] = Field(None, gt=0)
    """Learning rate of the critic; `lr` by default."""

    critic_lr_warmup_iters: Annotated[int, CRITIC] = Field(0, ge=0)
    """Optimizer steps of the critic's linear warm-up."""

    critic: Annotated[CriticConfig, CRITIC] = CriticConfig()

    weight_decay: Annotated[float, _OWN["steady"]] = Field(0.0, ge=0)
    """Decoupled weight decay of matrices. Megatron: `--weight-decay`."""

    weight_decay_incr_style: IncreaseStyle = "constant"
    """Shape of the change of weight decay over the run, from `start_weight_decay` to `end_weight_decay`; `constant`
    stays at `weight_decay`. Megatron: `--weight-decay-incr-style`."""

    start_weight_decay: Annotated[float | None, _OWN["rising"]] = Field(None, ge=0)
    """Weight decay at the start of the run, where `weight_decay_incr_style` is not `constant`. Megatron:
    `--start-weight-decay`."""

    end_weight_decay: Annotated[float | None, _OWN["rising"]] = Field(None, ge=0)
    """Weight decay at the end of the run, where `weight_decay_incr_style` is not `constant`. Megatron:
    `--end-weight-decay`."""

    reset_optimizer_states: bool = False
    """Reset the optimizer's moments to zero at the start of every iteration, with bias correction as in a first step;
    schedules continue. With one optimizer step per iteration that step is the sign of the gradient, as with slime's
    `--use-stateless-adam`. slime: `--reset-optimizer-states`."""

    moe_router_bias_update_rate: float = Field(0.0, ge=0)
    """Size of an optimizer step's change of the biases by which routers of DeepSeek V3, GLM-4.5, MiniMax-M2 and similar
    models choose experts: down where more tokens chose an expert than the mean, up where fewer did. 0 leaves the
    published biases unchanged; 1e-3 is usual in pretraining of such models. See docs/moe.md. Megatron:
    `--moe-router-bias-update-rate`."""

    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of Adam's first moment. Megatron: `--adam-beta1`."""

    adam_beta2: float = Field(0.98, ge=0, lt=1)
    """Decay rate of Adam's second moment. Megatron: `--adam-beta2`."""

    adam_eps: float = Field(1e-8, gt=0)
    """Adam's ε, which is added to the denominator. Megatron: `--adam-eps`."""

    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 turns clipping off. Megatron: `--clip-grad`."""

    timeout: float = Field(3600, gt=0)
    """Seconds that one training step, score or copy of the state may take before it counts as hung. Writing and reading
    a checkpoint may take a second more for every 20 MB of a rank's part."""

    distributed_timeout_minutes: int = Field(10, ge=1)
    """Minutes that the ranks wait for each other, in one collective of any of their process groups. Then the engine is
    restarted. A broadcast of weights to rollout engines, and the meeting before the first one, may take as long.
    Megatron and slime: `--distributed-timeout-minutes`."""

    train_env_vars: Variables = Field(default_factory=dict)
    """Environment variables of the training ranks' processes, set before PyTorch is imported: `{NCCL_DEBUG: INFO}`.
    docs/libraries.md has those that are set by default. slime: `--train-env-vars`."""

    only_train_params_name_list: tuple[Text, ...] = ()
    """Regular expressions of the actor's parameters to train; all others are frozen. An expression matches anywhere in
    a parameter's Hugging Face name. Frozen parameters stay bitwise unchanged, without gradient or optimizer state.
    slime: `--only-train-params-name-list`."""

    freeze_params_name_list: tuple[Text, ...] = ()
    """Regular expressions of the actor's parameters to freeze; all others are trained. A critic is always trained
    whole. slime: `--freeze-params-name-list`."""

    lora: LoraConfig = LoraConfig()

    @field_validator("only_train_params_name_list", "freeze_params_name_list")
    @classmethod
    def _patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"has {pattern!r}, which is not a regular expression: {error}") from error
            if not pattern:
                raise ValueError("has an empty text, which is in every name: leave it out")
        return patterns

    @property
    def warms_up(self) -> bool:
        """Whether the learning rate rises at the start of the run."""
        return bool(self.lr_warmup_iters or self.lr_warmup_fraction)

    @property
    def of_critic(self) -> "TrainingConfig":
        """These options for the critic, with its own learning rate and warm-up, and with the options of `critic`."""
        rates = {
            "lr": self.critic_lr or self.lr,
            "lr_warmup_iters": self.critic_lr_warmup_iters,
            "lr_warmup_fraction": None,
            "lr_warmup_init": 0.0,
        }
        own = self.critic.own
        unread: dict[str, object] = {"only_train_params_name_list": (), "freeze_params_name_list": ()}
        if own.get("lr_decay_style", "WSD") != "WSD":
            unread |= {"lr_wsd_decay_style": None, "lr_wsd_decay_iters": None}
        if own.get("weight_decay_incr_style") == "constant":
            unread |= {"start_weight_decay": None, "end_weight_decay": None}
        return self.model_copy(update={**rates, **unread, **own})

    @property
    def tensor_model_parallel_size(self) -> int:
        """Ranks that share each layer."""
        return int(self.megatron.get("tensor_model_parallel_size") or 1)

    @property
    def pipeline_model_parallel_size(self) -> int:
        """Pipeline stages over which the layers are distributed."""
        return int(self.megatron.get("pipeline_model_parallel_size") or 1)

    @property
    def ranks_of_sequence(self) -> int:
        """Ranks that share each sequence, on either engine."""
        return int(self.megatron.get("context_parallel_size") or self.context_parallel_size)

    @property
    def packs_rows(self) -> bool:
        """Whether the torch engine puts several samples into one row."""
        return self.engine == "torch" and (self.sequence_packing or self.context_parallel_size > 1)

    @property
    def data_parallel_size(self) -> int:
        """Ranks, or groups of ranks, that have their own samples."""
        model_ranks = self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.ranks_of_sequence
        return self.world_size // model_ranks

    @rule
    def _megatron_fits(self) -> None:
        options = self.megatron
        if options and self.engine != "megatron":
            raise ValueError(f"megatron is set, but engine is {self.engine}, which does not read it")
        if self.lora.r and self.engine != "torch":
            raise ValueError(
                f"lora.r is {self.lora.r}, but engine is {self.engine}, and megatron-core has no adapters: set engine "
                "to torch"
            )
        for name, value in options.items():
            if name.endswith("_parallel_size") and value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"megatron.{name} is {value!r}; it must be a whole number of ranks")
        tensor, pipeline, context = (
            self.tensor_model_parallel_size,
            self.pipeline_model_parallel_size,
            self.ranks_of_sequence,
        )
        if self.engine == "torch" and self.world_size % context:
            raise ValueError(f"world_size ({self.world_size}) is not divisible by context_parallel_size ({context})")
        if self.world_size % (tensor * pipeline * context):
            raise ValueError(
                f"world_size ({self.world_size}) is not divisible by megatron.tensor_model_parallel_size × "
                f"pipeline_model_parallel_size × context_parallel_size = {tensor} × {pipeline} × {context} = "
                f"{tensor * pipeline * context}"
            )
        expert = (options.get("expert_model_parallel_size") or 1) * pipeline
        expert *= options.get("expert_tensor_parallel_size") or tensor
        if self.world_size % expert:
            raise ValueError(
                f"world_size ({self.world_size}) is not divisible by the {expert} ranks that hold a whole set of "
                "experts: expert_model_parallel_size × expert_tensor_parallel_size (by default "
                "tensor_model_parallel_size) × pipeline_model_parallel_size"
            )
        if options.get("sequence_parallel") and tensor == 1:
            raise ValueError("megatron.sequence_parallel needs megatron.tensor_model_parallel_size > 1")
        if (options.get("expert_model_parallel_size") or 1) > 1 and tensor > 1 and not options.get("sequence_parallel"):
            raise ValueError(
                "megatron.expert_model_parallel_size with tensor_model_parallel_size > 1 needs "
                "megatron.sequence_parallel: true"
            )

    @rule
    def _pipeline_is_right(self) -> None:
        """Reject a virtual pipeline whose transfer options give wrong gradients without an error. Megatron's defaults
        are such options; see docs/engines/megatron.md."""
        options = self.megatron
        if options.get("virtual_pipeline_model_parallel_size") is None:
            return
        if self.pipeline_model_parallel_size == 1:
            raise ValueError(
                "megatron.virtual_pipeline_model_parallel_size needs megatron.pipeline_model_parallel_size > 1"
            )
        if options.get("overlap_p2p_comm") is False or options.get("batch_p2p_comm") is True:
            raise ValueError(
                "megatron.virtual_pipeline_model_parallel_size gives wrong gradients, without an error, unless "
                "overlap_p2p_comm is true and batch_p2p_comm is false; leave both out"
            )

    @rule
    def _host_optimizer_is_right(self) -> None:
        """Reject options of an optimizer on the host that Megatron ends with an assertion on, or does not read."""
        options = self.megatron
        if not options.get("optimizer_cpu_offload"):
            for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"):
                if options.get(name):
                    raise ValueError(
                        f"megatron.{name} has an effect only with megatron.optimizer_cpu_offload: true: set that, or "
                        "leave it out"
                    )
            if options.get("use_precision_aware_optimizer"):
                raise ValueError(
                    "megatron.use_precision_aware_optimizer is supported only with megatron.optimizer_cpu_offload: "
                    "true: set that, or leave it out"
                )
            return
        for name in ("use_precision_aware_optimizer", "use_distributed_optimizer"):
            if not options.get(name):
                raise ValueError(f"megatron.optimizer_cpu_offload needs megatron.{name}: true")
        if self.dtype != "bfloat16":
            raise ValueError(
                f"megatron.optimizer_cpu_offload needs dtype: bfloat16, but dtype is {self.dtype}: Megatron does not "
                "load the state of float32 parameters that are updated on the host"
            )
        fraction = options.get("optimizer_offload_fraction", 1.0)
        if type(fraction) not in (int, float) or not 0 < fraction <= 1:
            raise ValueError(f"megatron.optimizer_offload_fraction is {fraction!r}; it must be above 0 and at most 1")

    @property
    def takes_several_steps(self) -> bool:
        """Whether an iteration has more than one optimizer step."""
        return self.num_steps_per_rollout > 1

    @rule
    def _consistent(self) -> None:
        if self.lora.r and self.moe_router_bias_update_rate:
            raise ValueError(
                f"moe_router_bias_update_rate ({self.moe_router_bias_update_rate}) changes weights of the model, "
                f"but with lora.r = {self.lora.r} only adapters are trained: leave it out"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr}) is above lr ({self.lr})")
        critic = self.of_critic
        if critic.min_lr > critic.lr:
            least = "min_lr" if self.critic.min_lr is None else "critic.min_lr"
            most = "lr" if self.critic_lr is None else "critic_lr"
            raise ValueError(f"{least} ({critic.min_lr}) is above {most} ({critic.lr})")
        ends = "lr_decay_iters" if self.critic.lr_decay_iters is None else "critic.lr_decay_iters"
        for name, last, of in (("lr_warmup_iters", "lr_decay_iters", self), ("critic_lr_warmup_iters", ends, critic)):
            if of.lr_decay_iters is not None and of.lr_warmup_iters >= of.lr_decay_iters:
                raise ValueError(f"{name} ({of.lr_warmup_iters}) must be below {last} ({of.lr_decay_iters})")
        if problem := schedule_problem(self):
            raise ValueError(problem)
        if self.critic.own and (problem := schedule_problem(self.of_critic)):
            problem = problem.replace("set lr_warmup_iters", "set critic_lr_warmup_iters")
            raise ValueError(f"for the critic, with the options of training.critic: {problem}")
        if self.only_train_params_name_list and self.freeze_params_name_list:
            raise ValueError(
                "only_train_params_name_list and freeze_params_name_list exclude each other: each selects the "
                "trained parameters; leave one of them out"
            )
        for name in ("only_train_params_name_list", "freeze_params_name_list"):
            if self.lora.r and getattr(self, name):
                raise ValueError(
                    f"{name} has no effect with lora.r = {self.lora.r}, which trains only adapters: leave it out; "
                    "lora.target_modules selects their layers"
                )
        if self.micro_batch_size is not None and self.max_tokens_per_gpu is not None:
            raise ValueError(
                f"micro_batch_size ({self.micro_batch_size}) and max_tokens_per_gpu ({self.max_tokens_per_gpu}) "
                "exclude each other: both split a step's samples; leave one of them out"
            )
