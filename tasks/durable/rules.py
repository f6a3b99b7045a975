"""What steps read and do, by the version of the code that committed them or began the run.

`cairn.storage.ledger.terms` keeps with every run what its steps read. Runs of format 2 carry none: theirs are here, for
ever."""

from cairn.configs.digest import recorded_digest
from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.rollout.plan import kind_of
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.terms import Rules, Terms
from cairn.storage.store import canonical

_FORMAT_2: dict[Step, Rules] = {
    Step.ROLLOUT: Rules(
        reads=(
            "seed",
            "data",
            "rollout.engine",
            "rollout.sglang",
            "rollout.server_groups",
            "rollout.dtype",
            "rollout.num_threads",
            "rollout.n_samples_per_prompt",
            "rollout.partial_rollout",
            "rollout.mask_offpolicy_in_partial_rollout",
            "rollout.rollout_max_prompt_len",
            "rollout.rollout_max_response_len",
            "rollout.rollout_temperature",
            "rollout.rollout_top_p",
            "rollout.rollout_top_k",
            "rollout.rollout_stop_token_ids",
        ),
        externals=("data", "model"),
    ),
    Step.REWARD: Rules(
        reads=("reward.rm_type", "reward.custom_rm_path", "reward.rm_timeout"),
        plugins=("reward.custom_rm_path",),
    ),
    Step.FILTER: Rules(
        reads=("rollout.rollout_batch_size", "rollout.max_refill_rounds", "rollout.dynamic_sampling_filter"),
        plugins=("rollout.dynamic_sampling_filter",),
    ),
    Step.SCORE: Rules(
        reads=(
            "algorithm.advantage_estimator",
            "algorithm.kl_coef",
            "algorithm.use_kl_loss",
            "algorithm.use_opd",
            "algorithm.use_rollout_logprobs",
            "training.engine",
            "training.megatron",
            "training.world_size",
            "training.num_threads",
            "training.dtype",
            "training.max_tokens_per_gpu",
            "training.num_steps_per_rollout",
            "rollout.rollout_temperature",
        ),
        externals=("model", "ref_model", "teacher_model", "critic_model"),
    ),
    Step.ADVANTAGE: Rules(
        reads=(
            "algorithm.advantage_estimator",
            "algorithm.rewards_normalization",
            "algorithm.grpo_std_normalization",
            "algorithm.normalize_advantages",
            "algorithm.gamma",
            "algorithm.lambd",
            "algorithm.kl_coef",
            "algorithm.kl_loss_type",
            "algorithm.use_opd",
            "algorithm.opd_kl_coef",
            "algorithm.use_rollout_logprobs",
        ),
    ),
    Step.TRAIN: Rules(
        reads=(
            "algorithm",
            "training.engine",
            "training.megatron",
            "training.world_size",
            "training.num_gpus_per_rank",
            "training.num_threads",
            "training.dtype",
            "training.gradient_checkpointing",
            "training.global_batch_size",
            "training.num_steps_per_rollout",
            "training.max_tokens_per_gpu",
            "training.optimizer",
            "training.lr",
            "training.min_lr",
            "training.lr_decay_style",
            "training.lr_warmup_iters",
            "training.lr_decay_iters",
            "training.critic_lr",
            "training.critic_lr_warmup_iters",
            "training.weight_decay",
            "training.adam_beta1",
            "training.adam_beta2",
            "training.adam_eps",
            "training.clip_grad",
            "training.lora",
            "rollout.rollout_temperature",
            "rollout.num_rollout",
        ),
        externals=("model", "critic_model"),
    ),
    Step.CHECKPOINT: Rules(
        reads=("training.optimizer",),
    ),
    Step.SYNC: Rules(
        reads=("rollout.num_engines",),
    ),
    Step.EVAL: Rules(
        reads=(
            "seed",
            "eval.benchmarks",
            "reward.rm_type",
            "reward.custom_rm_path",
            "reward.rm_timeout",
            "rollout.engine",
            "rollout.sglang",
            "rollout.server_groups",
            "rollout.dtype",
            "rollout.num_threads",
            "rollout.rollout_stop_token_ids",
        ),
        externals=("model", "eval"),
        plugins=("reward.custom_rm_path",),
    ),
}


def untold(rollout: RolloutConfig, began: int | None) -> str | None:
    """Why the engine does not say what top-p and top-k left to draw tokens from, in a run that goes on without; None
    in any other.

    Runs of format 2 (`began`: that of the manifest, None: there is none yet) did not ask for it, and scored over the
    whole vocabulary. They do now, with an engine that says; with another one they go on as they began. A run that
    begins today is refused there (`cairn.flows.driver.validation`), a fork of such a run too.
    """
    return next(iter(kind_of(rollout.engine).kept_problems(rollout)), None) if began == 2 else None


def rules_of(terms: Terms, step: Step) -> Rules:
    """What a step read under some terms."""
    return _FORMAT_2[step] if terms.rules is None else terms.rules[step]


def config_digest(terms: Terms, step: Step) -> str:
    """Of what a step reads of a configuration, the source of user code included."""
    rules = rules_of(terms, step)
    fields = recorded_digest(terms.config, rules.reads)
    sources = {option: terms.plugin_digest(option) for option in rules.plugins}
    return canonical.digest({"fields": fields, "plugins": sources}) if any(sources.values()) else fields


def external_inputs(terms: Terms, step: Step) -> dict[str, str]:
    """Digests of what a step reads from outside the ledger, of which a run need not have all, and of what the engines
    that it calls are made from."""
    rules = rules_of(terms, step)
    read = {name: terms.inputs[name] for name in rules.externals if name in terms.inputs}
    return read | {f"engine.{name}": recorded_digest(terms.config, options) for name, options in rules.engines.items()}
