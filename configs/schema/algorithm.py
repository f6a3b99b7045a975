"""From rewards to a loss."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from cairn.configs.kinds import ESTIMATOR, LOSS, declared
from cairn.configs.schema.base import Code, Section
from cairn.configs.schema.unread import unread

WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators whose baseline or scale is that of the whole batch: `normalize_advantages` is a part of them."""

_CLIP_RANGE = ("eps_clip", "eps_clip_high")

KLType = Literal["k1", "k2", "k3", "low_var_kl"]
RatioLevel = Literal["token", "sequence", "geometric"]
RatioMode = Literal["truncate", "clip", "mask"]

LearnsFrom = Literal["responses", "demonstrations", "preferences"]
"""What a run trains on: responses that its policy samples, or those that the rows of its data hold."""


_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Takes a list for a tuple: what a validator before the fields has seen is no JSON any more, which would allow it."""


class AlgorithmConfig(Section):
    """Advantages and the policy loss."""

    loss_type: Code = "policy_loss"
    """`policy_loss` is the clipped surrogate of PPO and GRPO, `gspo` the same with the ratio of a whole response,
    `cispo` the policy gradient with clipped weights, `dppo_tv` and `dppo_kl` that with the ratio to what sampled, and
    without the tokens that have moved further than a divergence, `clip_cov` and `kl_cov` hold back the tokens whose
    learning takes the most entropy, `forward_kl_topk` the divergence from the `distillation_topk` most probable tokens
    of a teacher alone, `sft_loss` the likelihood of demonstrations, which the rows of `data.path` then hold
    (docs/sft.md); or a function of your own, `package.module.function` or `file.py:function`. slime:
    `--loss-type`."""

    advantage_estimator: Code = "grpo"
    """`grpo` compares a sample with its group, and so do `gspo` and `cispo`, which name the loss besides, where
    `loss_type` is left out; `grpo_turns` compares the rewards of its turns with those of its group's (docs/agents.md);
    `gdpo` compares each of several rewards by itself; `rloo` compares a sample with the others of its group; `maxrl`
    divides by the group's mean reward; `ppo` trains a critic beside the actor and estimates advantages from its values;
    `reinforce_plus_plus` compares a token with the whole batch, `reinforce_plus_plus_baseline` after its group's mean
    is taken off; `dpo` learns from pairs of responses of which one is preferred, which the rows of `data.path` then
    hold (docs/sft.md); or a function of your own, `package.module.function` or `file.py:function`. slime:
    `--advantage-estimator`."""

    rewards_normalization: bool = True
    """`grpo`, `grpo_turns`, `gspo`, `cispo`, `reinforce_plus_plus_baseline`: subtract the group's mean reward. slime:
    on unless `--disable-rewards-normalization`."""

    grpo_std_normalization: bool = True
    """`grpo`, `grpo_turns`: divide by the group's standard deviation. Off takes away the bias towards questions that
    nearly all samples get right or wrong; the loss still weighs a token by the length of its response, and with
    `loss_scale_factor` it is Dr. GRPO. slime: on unless `--disable-grpo-std-normalization`."""

    normalize_advantages: bool = False
    """Shift and scale the advantages of all trained tokens of an iteration to mean 0 and variance 1;
    `reinforce_plus_plus` and `reinforce_plus_plus_baseline` want it. slime: `--normalize-advantages`."""

    gamma: float = Field(1.0, gt=0, le=1)
    """`ppo`, `reinforce_plus_plus`: discount of a token's reward for each trained token before it. slime: `--gamma`."""

    lambd: float = Field(1.0, ge=0, le=1)
    """`ppo`: λ of generalised advantage estimation; 1 trusts rewards alone, 0 the critic's next value alone. slime:
    `--lambd`."""

    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the reference model, by `kl_loss_type`, that rewards are lowered by; `grpo`,
    `gspo` and `cispo` have no such term. slime: `--kl-coef`."""

    bootstrap_truncated: bool = False
    """`ppo`: a response that was cut at the longest length allowed has not ended: what would have come is what the
    critic expects at its last token, in the place of its reward."""

    value_clip: float = Field(0.2, ge=0)
    """`ppo`: how far a value may move from the one before the update until moving it further pays nothing. slime:
    `--value-clip`."""

    num_critic_only_steps: int = Field(0, ge=0)
    """`ppo`: iterations, from the run's first, in which the critic alone is trained. slime:
    `--num-critic-only-steps`."""

    dpo_beta: float = Field(0.1, gt=0)
    """`dpo`: β, how strongly the policy is held to the reference model; the smaller, the further it goes. TRL:
    `beta`."""

    dpo_label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """`dpo`: the share of pairs of which the other response is taken to be the better one. TRL: `label_smoothing`."""

    gdpo_reward_keys: Annotated[tuple[str, ...], _TUPLE] = ()
    """`gdpo`: the rewards that are normalised apart, by their names in the mapping that the grader returns; `reward` is
    the sample's reward, and `overlong_penalty` what its length costs it (docs/rewards.md). A sample without a number
    under each of them fails. verl: `gdpo_reward_keys`."""

    gdpo_reward_weights: Annotated[tuple[float, ...] | None, _TUPLE] = None
    """`gdpo`: what each of these rewards counts for; 1 each by default. verl: `gdpo_reward_weights`."""

    eps_clip: float = Field(0.2, ge=0)
    """Lower clip range of the probability ratio. Where it and `eps_clip_high` are left out, `gspo` has its paper's 3e-4
    and 4e-4, since the ratios of whole responses stay near 1, and `cispo` 1 and 4. Of `dppo_tv` and `dppo_kl` it is the
    divergence from which on a token is left out that becomes less probable, by default their paper's 0.15 and 0.05
    nats. slime: `--eps-clip`, 0.2 for all."""

    eps_clip_high: float | None = Field(None, ge=0)
    """Upper clip range; `eps_clip` by default. slime: `--eps-clip-high`."""

    eps_clip_c: float | None = Field(None, gt=1)
    """Dual-clip bound on the loss where the advantage is negative. slime: `--eps-clip-c`."""

    clip_cov_ratio: float = Field(2e-4, gt=0, le=1)
    """`clip_cov`: the share of an optimizer step's tokens that have no gradient, of those with a covariance of
    advantage and log-prob between `clip_cov_lb` and `clip_cov_ub`; one at least. verl: `policy_loss.clip_cov_ratio`."""

    clip_cov_lb: float = 1.0
    """`clip_cov`: verl: `policy_loss.clip_cov_lb`."""

    clip_cov_ub: float = 5.0
    """`clip_cov`: verl: `policy_loss.clip_cov_ub`."""

    kl_cov_ratio: float = Field(2e-4, gt=0, le=1)
    """`kl_cov`: the share of an optimizer step's tokens, those of the highest covariance of advantage and log-prob,
    that pay for how far they move; one at least. verl: `policy_loss.kl_cov_ratio`."""

    ppo_kl_coef: float = Field(1.0, ge=0)
    """`kl_cov`: what they pay, for each nat of the log-ratio. verl: `policy_loss.ppo_kl_coef`."""

    use_opsm: bool = False
    """Off-policy sequence masking: responses with a negative advantage do not count once they have become less probable
    than to the behaviour policy, as the rollout engine returned its log-probs, by more than `opsm_delta`
    (DeepSeek-V3.2). slime: `--use-opsm`, which compares with the trainer's log-probs."""

    opsm_delta: float = Field(1e-4, ge=0)
    """How much less probable, in nats a token. slime: `--opsm-delta`."""

    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus. slime: `--entropy-coef`."""

    use_kl_loss: bool = False
    """Add the KL divergence from the reference model to the loss. With `use_tis` a token's share of it is multiplied by
    its ratio of the current over the behaviour policy, so that it is of the tokens that the current one would sample.
    slime: `--use-kl-loss`."""

    kl_loss_coef: float = Field(0.0, ge=0)
    """Weight of the KL loss. slime: `--kl-loss-coef`."""

    kl_loss_type: KLType | None = None
    """Estimator of the KL divergence from the reference model; by default `k2` in the loss and `k1` in the rewards.
    In the loss it is the gradient that counts: that of `k2` is the divergence's own where the policy is the one that
    sampled; that of `k1` is 0 on average, and it is refused with a positive `kl_loss_coef`; that of `k3` and
    `low_var_kl` is the gradient of the divergence of the policy from the view of the reference model,
    KL(reference ‖ policy). In the rewards it is the value that counts: `k1` and `k3` are unbiased. slime:
    `--kl-loss-type`."""

    use_unbiased_kl: bool = False
    """Multiply the KL loss of a token by its ratio of the current over the behaviour policy, as the rollout engine
    returned its log-probs, and differentiate through it: value and gradient are then those of the divergence, for `k3`,
    the default with it, and `k1`, also where the policy has moved since it sampled (DeepSeek-V3.2). slime:
    `--use-unbiased-kl`, which takes the ratio over the trainer's log-probs."""

    ref_update_interval: int | None = Field(None, ge=1)
    """Iterations after which the reference becomes the policy as it is then: iteration i is held against the weights
    that were there before iteration ⌊i / interval⌋ × interval. Null keeps the reference that the run began with. slime:
    `--ref-update-interval`."""

    use_opd: bool = False
    """On-policy distillation: lower every token's advantage by how much more probable it is to the policy than to the
    teacher, `model.teacher_path`. slime: `--use-opd`."""

    opd_kl_coef: float = Field(1.0, ge=0)
    """Weight of the reverse KL divergence from the teacher in advantages. slime: `--opd-kl-coef`."""

    distillation_loss_coef: float = Field(0.0, ge=0)
    """Weight of the loss `forward_kl_topk` beside a loss that follows advantages. verl:
    `distillation_loss.distillation_loss_coef`."""

    distillation_topk: int = Field(32, ge=1)
    """How many of the teacher's most probable tokens are kept with the scores, ids and log-probs, and learned from, at
    each token of a response. verl: `distillation_loss.topk`."""

    use_rollout_logprobs: bool = False
    """Take the rollout engine's log-probs as those of the old policy instead of computing them again. slime:
    `--use-rollout-logprobs`."""

    use_rollout_routing_replay: bool = False
    """Of a mixture of experts, record which experts the rollout engine's model chose for each token, and have the
    trainer's choose the same ones: in the scores of the old policy and in every update, with the weights that its own
    router gives them (R3, arXiv 2510.11370). See docs/moe.md. slime: `--use-rollout-routing-replay`."""

    use_tis: bool = False
    """Correct for the difference between the proximal policy's log-probs, which the trainer computes at the start of
    the update, and the behaviour policy's, which the rollout engine returned, by `custom_tis_function_path`. slime:
    `--use-tis`."""

    custom_tis_function_path: Code = "tis"
    """How: `tis` is truncated importance sampling; `icepop` leaves out tokens whose ratio is outside the bounds; `mis`
    does either, for tokens or responses, and rejects besides, by the options below; or a function of your own,
    `package.module.function` or `file.py:function`, see docs/plugins.md. slime: `--custom-tis-function-path`."""

    tis_clip: float = Field(2.0, gt=0)
    """Upper bound of the importance weight. slime: `--tis-clip`."""

    tis_clip_low: float = Field(0.0, ge=0)
    """Lower bound of the importance weight. slime: `--tis-clip-low`."""

    tis_level: RatioLevel = "token"
    """`mis`: the ratio that makes the weight. `token`: of each token; `sequence`: the product over a response;
    `geometric`: its geometric mean, whose bounds are near 1, such as 0.9999 and 1.0001. slime: `tis_level` of its mis
    example; verl: `rollout_is`."""

    tis_mode: RatioMode = "truncate"
    """`mis`: `truncate` holds the ratio below `tis_clip`, `clip` between `tis_clip_low` and `tis_clip`, and `mask`
    leaves out what is outside of the two. slime: `tis_mode` of its mis example."""

    use_rs: bool = False
    """`mis`: leave out tokens or responses whose ratio is outside of `rs_lower_bound` and `rs_upper_bound`. slime:
    `use_rs` of its mis example; verl: `rollout_rs`."""

    rs_level: RatioLevel = "token"
    """`mis`: the ratio that is held against these bounds, as in `tis_level`. slime: `rs_level` of its mis example."""

    rs_lower_bound: float | None = Field(None, ge=0)
    """`mis`: `tis_clip_low` by default. slime: `rs_lower_bound` of its mis example."""

    rs_upper_bound: float | None = Field(None, gt=0)
    """`mis`: `tis_clip` by default. slime: `rs_upper_bound` of its mis example."""

    rs_veto_threshold: float | None = Field(None, gt=0, lt=1)
    """`mis`: leave out responses with a token whose ratio is below this, such as 1e-4. slime: `rs_veto_threshold` of
    its mis example."""

    tis_batch_normalize: bool = False
    """Divide the weights by their mean over the optimizer step: over its tokens, or where `tis_level` is another one
    over its responses; those that are left out do not count. The old policy's log-probs are then scored also for a
    single optimizer step, since the mean is to be known before the first micro-batch. slime: `tis_batch_normalize` of
    its mis example; verl: `rollout_is_batch_normalize`."""

    get_mismatch_metrics: bool = False
    """Record how far trainer and rollout engine are apart, whether that is corrected for or not: perplexities,
    divergences, and the share of tokens whose ratio is outside of `tis_clip_low` and `tis_clip`. With
    `use_rollout_logprobs` the trainer's log-probs are those of the update itself, so nothing more is computed, and in
    the second and later optimizer steps of an iteration how far the policy has moved is part of it. slime:
    `--get-mismatch-metrics`."""

    custom_pg_loss_reducer_function_path: Code = "mean"
    """How the losses of tokens become that of the batch: `mean`, as the two options below say; or a function of your
    own, `package.module.function` or `file.py:function`, see docs/plugins.md. slime:
    `--custom-pg-loss-reducer-function-path`."""

    calculate_per_token_loss: bool = False
    """Average the loss over all tokens of the batch instead of over samples. slime: `--calculate-per-token-loss`."""

    loss_scale_factor: int | None = Field(None, ge=1)
    """Divide the sum over a sample's trained tokens, in the policy's loss, by this constant instead of by their number,
    so that a token counts the same in a short response and in a long one; `rollout.rollout_max_response_len` is a
    natural choice. With `grpo_std_normalization` off it is Dr. GRPO. Metrics stay means over tokens. verl:
    `actor.loss_scale_factor` of `seq-mean-token-sum-norm`; slime: a reducer of one's own."""

    @property
    def learns_from(self) -> LearnsFrom:
        """Where the responses come from that are trained on."""
        if self.advantage_estimator == "dpo":
            return "preferences"
        return "demonstrations" if self.loss_type == "sft_loss" else "responses"

    @property
    def corrects_for_lag(self) -> bool:
        """Whether tokens of older weights may be trained on: something makes up for the difference, a correction or a
        ratio to the policy that sampled, or the loss holds of any tokens, whoever sampled them."""
        corrected = self.use_tis or self.use_rollout_logprobs or self.ratio_to_behaviour
        return corrected or self.loss_type == "forward_kl_topk"

    @property
    def ratio_to_behaviour(self) -> bool:
        """Whether the loss, one of ours, takes its ratio to the policy that sampled, and none to the proximal one."""
        if not self.names_a_loss:  # those that go with an estimator have another
            return False
        ours = LOSS.declaration_of_ours(self.loss_type)
        return ours is not None and "rollout_log_probs" in ours.needs and "old_log_probs" not in ours.needs

    @property
    def reads_kl(self) -> bool:
        """Whether the KL divergence from the reference model is computed, in the loss or in the rewards."""
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def learns_from_top_k(self) -> bool:
        """Whether a loss of ours is taken over the most probable tokens of a teacher."""
        return self.distillation_loss_coef > 0 or self.loss_type == "forward_kl_topk"

    @property
    def names_a_loss(self) -> bool:
        """Whether the loss is another one than by default. What one of ours declares takes long to import."""
        return self.loss_type != AlgorithmConfig.model_fields["loss_type"].default

    @property
    def loss(self) -> str:
        """The loss that is trained with: `loss_type`, or where it is left at its default the one that goes with the
        estimator. Raises BadPlugin where an estimator of the user's cannot be had."""
        name = self.advantage_estimator
        if self.names_a_loss:
            return self.loss_type
        said = declared(ESTIMATOR.load(name)) if "." in name else ESTIMATOR.declaration_of_ours(name)
        return (said and said.loss) or self.loss_type

    @property
    def names_user_code(self) -> bool:
        """Whether the estimator or the loss is the user's own, of which it is not known here what it needs."""
        return any("." in name for name in (self.advantage_estimator, self.loss_type))

    @property
    def kl_estimator(self) -> KLType:
        """The estimator that `kl_loss_type` names, or its default."""
        if self.kl_loss_type is not None or self.kl_coef > 0:
            return self.kl_loss_type or "k1"
        return "k3" if self.use_unbiased_kl else "k2"

    @property
    def rs_bounds(self) -> tuple[float, float]:
        """Between which a ratio is not rejected."""
        low = self.tis_clip_low if self.rs_lower_bound is None else self.rs_lower_bound
        return low, self.tis_clip if self.rs_upper_bound is None else self.rs_upper_bound

    def trains_actor(self, iteration: int) -> bool:
        """Whether an iteration trains the actor, or the critic alone."""
        return iteration >= self.num_critic_only_steps

    def updates_reference(self, iteration: int) -> bool:
        """Whether the policy that an iteration leaves is the reference of the next one."""
        return self.ref_update_interval is not None and (iteration + 1) % self.ref_update_interval == 0

    def usual(self, option: str) -> Any:
        """What an option is where it is left out: as the loss has it, if that is one of ours with a default of its own,
        else as all do."""
        default, usual = type(self).model_fields[option].default, type(self).model_fields["loss_type"].default
        if self.names_user_code or self.loss == usual:
            return default
        ours = LOSS.declaration_of_ours(self.loss)
        return default if ours is None else ours.defaults.get(option, default)

    @classmethod
    def usual_clip_range(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        """`eps_clip` and `eps_clip_high` of a section that leaves both out."""
        named = {key: section[key] for key in ("loss_type", "advantage_estimator") if isinstance(section.get(key), str)}
        chosen = cls.model_construct(**named)
        return {name: chosen.usual(name) for name in _CLIP_RANGE}

    @model_validator(mode="before")
    @classmethod
    def _by_the_paper_of_the_loss(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.keys() & {*_CLIP_RANGE}:
            return given
        return cls.usual_clip_range(given) | dict(given)

    @model_validator(mode="after")
    def _consistent(self) -> "AlgorithmConfig":
        if self.use_rollout_logprobs and self.use_tis:
            raise ValueError(
                "use_rollout_logprobs (true) and use_tis (true) exclude each other: importance sampling corrects "
                "the difference between the two log-probs; set one of them to false"
            )
        if self.kl_loss_coef > 0 and self.kl_coef > 0:
            raise ValueError(
                f"kl_loss_coef ({self.kl_loss_coef}) and kl_coef ({self.kl_coef}) both hold the policy to the "
                "reference model, one in the loss and one in the rewards; set one of them to 0"
            )
        if self.loss_scale_factor is not None and self.calculate_per_token_loss:
            raise ValueError(
                f"loss_scale_factor ({self.loss_scale_factor}) and calculate_per_token_loss (true) exclude each other: "
                "both say what the sum over tokens is divided by; leave one of them out"
            )
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(
                f"clip_cov_lb ({self.clip_cov_lb}) is not below clip_cov_ub ({self.clip_cov_ub}): no token would be "
                "between them"
            )
        if self.tis_clip_low > self.tis_clip:
            raise ValueError(f"tis_clip_low ({self.tis_clip_low}) is above tis_clip ({self.tis_clip})")
        low, high = self.rs_bounds
        if self.use_rs and low > high:
            raise ValueError(
                f"rs_lower_bound ({low}) is above rs_upper_bound ({high}), so that every token would be rejected; by "
                "default they are tis_clip_low and tis_clip"
            )
        if self.use_unbiased_kl and self.kl_loss_type == "k2":
            raise ValueError(
                "kl_loss_type (k2) is no unbiased estimate, with use_unbiased_kl (true) or without; set "
                "kl_loss_type=k3, or leave one of them out"
            )
        estimator = ESTIMATOR.declaration_of_ours(self.advantage_estimator)
        if self.names_a_loss and estimator is not None and estimator.loss not in (None, self.loss_type):
            raise ValueError(
                f"loss_type ({self.loss_type}) contradicts advantage_estimator ({self.advantage_estimator}), which is "
                f"trained with the loss {estimator.loss}; leave one of them out"
            )
        if self.loss_type == "dpo" and estimator is not None and self.advantage_estimator != "dpo":
            raise ValueError(
                "loss_type (dpo) follows the advantages of pairs, and advantage_estimator is "
                f"{self.advantage_estimator}; set advantage_estimator=dpo, which names its loss, and leave loss_type "
                "out"
            )
        changed = {name: value for name, value in self if value != type(self).model_fields[name].default}
        for name, why, way_out in unread(self, changed.keys()) if changed and not self.names_user_code else ():
            if name in changed:
                value = changed[name]
                shown = str(value).lower() if isinstance(value, bool) else value
                raise ValueError(f"{name} ({shown}) has no effect while {why}; {way_out}, or leave it out")
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        if self.advantage_estimator == "gdpo" and not keys:
            raise ValueError(
                "advantage_estimator (gdpo) normalises several rewards apart, and gdpo_reward_keys names none; set it "
                "to their names in what the grader returns"
            )
        if len(set(keys)) < len(keys):
            raise ValueError(f"gdpo_reward_keys ({', '.join(keys)}) names a reward twice; name each once")
        if weights is not None and len(weights) != len(keys):
            raise ValueError(
                f"gdpo_reward_weights has {len(weights)} numbers and gdpo_reward_keys {len(keys)} names; give one "
                "number for each name"
            )
        if self.advantage_estimator in WHITENED and not self.normalize_advantages:
            raise ValueError(
                f"advantage_estimator ({self.advantage_estimator}) compares a token with all others of the batch, and "
                "normalize_advantages is false; set normalize_advantages=true"
            )
        if self.kl_loss_coef > 0 and self.kl_loss_type == "k1" and not self.use_unbiased_kl:
            raise ValueError(
                f"kl_loss_type (k1) has a gradient of 0 on average as a loss, so kl_loss_coef ({self.kl_loss_coef}) "
                "would add noise alone; set kl_loss_type=k2, whose gradient is that of the divergence, or hold the "
                "policy to the reference model in the rewards, by kl_coef"
            )
        return self
