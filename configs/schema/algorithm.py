"""Options of advantage estimation and of the loss."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from cairn.configs.kinds import ESTIMATOR, LOSS
from cairn.configs.schema.base import Code, Section, Text, rule
from cairn.configs.schema.effect import When, when

WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators that require `normalize_advantages`: their baseline or scale is that of the whole batch."""

_CLIP_RANGE = ("eps_clip", "eps_clip_high")

KLType = Literal["k1", "k2", "k3", "low_var_kl"]
RatioLevel = Literal["token", "sequence", "geometric"]
RatioMode = Literal["truncate", "clip", "mask"]

LearnsFrom = Literal["responses", "demonstrations", "preferences"]
"""Responses on which a run trains: those that its policy samples, or those in the rows of its data."""


def _loss(name: str) -> When:
    """Return the condition that the loss, which the estimator may choose, has a name."""
    return When(
        lambda run: run.algorithm.loss == name,
        lambda run: f"the loss is {run.algorithm.loss}",
        f"set algorithm.loss_type={name}",
    )


_CLIP_COV, _KL_COV = _loss("clip_cov"), _loss("kl_cov")
_READS_KL = when(
    "algorithm.reads_kl",
    because="algorithm.use_kl_loss is false and algorithm.kl_coef is 0",
    remedy="set algorithm.use_kl_loss=true",
)
_TOP_K = when(
    "algorithm.learns_from_top_k",
    because="algorithm.distillation_loss_coef is 0",
    remedy="set algorithm.distillation_loss_coef or algorithm.loss_type=forward_kl_topk",
)
_SAMPLED = when(
    "algorithm.learns_from",
    "responses",
    "demonstrations",
    because="algorithm.advantage_estimator is dpo, which learns from pairs",
    remedy="choose another estimator",
)
_TIS = when("algorithm.use_tis")
_RS = When(
    lambda run: run.algorithm.use_rs or "." in run.algorithm.custom_tis_function_path,  # which may read any option
    lambda run: "algorithm.use_rs is false",
    "set algorithm.use_rs=true",
)
_CORRECTED = _TIS | when("algorithm.get_mismatch_metrics")
_SEVERAL_STEPS = when(
    "training.takes_several_steps",
    because="training.num_steps_per_rollout is 1, so that values are compared with themselves",
    remedy="raise training.num_steps_per_rollout",
)
_RATIOS = When(
    lambda run: (
        run.training.takes_several_steps or run.algorithm.use_rollout_logprobs or run.algorithm.ratio_to_behaviour
    ),
    lambda run: "training.num_steps_per_rollout is 1 and algorithm.use_rollout_logprobs is false: every ratio is 1",
    "change either",
)

_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Converts a list to a tuple. After a validator in mode "before", strict validation no longer accepts JSON lists for
tuples."""


class AlgorithmConfig(Section):
    """Advantages and the policy loss."""

    loss_type: Code = "policy_loss"
    """The loss. `policy_loss`: clipped surrogate of PPO and GRPO. `gspo`: the same with the ratio of a whole response.
    `cispo`: policy gradient with clipped weights. `dppo_tv`, `dppo_kl`: policy gradient weighted by the ratio to the
    policy that sampled; tokens that have moved further than a divergence are left out. `clip_cov`, `kl_cov`: hold back
    the tokens whose learning reduces entropy most. `forward_kl_topk`: only the divergence from the `distillation_topk`
    most probable tokens of a teacher. `sft_loss`: likelihood of demonstrations, which are the rows of `data.path`
    (docs/sft.md). Or a function of your own, `package.module.function` or `file.py:function`. slime: `--loss-type`."""

    advantage_estimator: Code = "grpo"
    """The advantage estimator. `grpo`: compares a sample with its group. `gspo`, `cispo`: as `grpo`, and select the
    loss of their name where `loss_type` is left out. `grpo_turns`: compares the rewards of a sample's turns with those
    of its group (docs/agents.md). `gdpo`: normalises each of several rewards separately. `rloo`: compares a sample with
    the others of its group. `maxrl`: divides by the group's mean reward. `ppo`: trains a critic in addition to the
    actor and estimates advantages from its values. `reinforce_plus_plus`: compares a token with the whole batch.
    `reinforce_plus_plus_baseline`: the same after subtracting the group's mean. `dpo`: learns from pairs of a preferred
    and another response, which are the rows of `data.path` (docs/sft.md). Or a function of your own,
    `package.module.function` or `file.py:function`. slime: `--advantage-estimator`."""

    rewards_normalization: bool = True
    """`grpo`, `grpo_turns`, `gspo`, `cispo`, `reinforce_plus_plus_baseline`: subtract the group's mean reward. slime:
    on unless `--disable-rewards-normalization`."""

    grpo_std_normalization: Annotated[bool, when("algorithm.rewards_normalization")] = True
    """`grpo`, `grpo_turns`: divide by the group's standard deviation. False removes the bias towards questions that
    nearly all samples answer correctly or wrongly. The loss still weights a token by the length of its response; with
    `loss_scale_factor` it is Dr. GRPO. slime: on unless `--disable-grpo-std-normalization`."""

    normalize_advantages: Annotated[bool, _SAMPLED] = False
    """Shift and scale the advantages of all trained tokens of an iteration to mean 0 and variance 1.
    `reinforce_plus_plus` and `reinforce_plus_plus_baseline` require it. slime: `--normalize-advantages`."""

    gamma: float = Field(1.0, gt=0, le=1)
    """`ppo`, `reinforce_plus_plus`: discount of a token's reward for each trained token before it. slime: `--gamma`."""

    lambd: float = Field(1.0, ge=0, le=1)
    """`ppo`: λ of generalised advantage estimation. 1 relies on rewards alone, 0 on the critic's next value alone.
    slime: `--lambd`."""

    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the reference model that is subtracted from rewards, estimated by
    `kl_loss_type`. `grpo`, `gspo` and `cispo` have no such term. slime: `--kl-coef`."""

    bootstrap_truncated: bool = False
    """`ppo`: replace the reward of a truncated response by the critic's value at its last token, which estimates the
    rest of the response."""

    value_clip: Annotated[float, _SEVERAL_STEPS] = Field(0.2, ge=0)
    """`ppo`: clip range of values. A value that has moved this far from the one before the update gains nothing by
    moving further. slime: `--value-clip`."""

    num_critic_only_steps: int = Field(0, ge=0)
    """`ppo`: number of iterations, from the run's first, that train the critic alone. slime:
    `--num-critic-only-steps`."""

    dpo_beta: float = Field(0.1, gt=0)
    """`dpo`: β, the strength of the tie to the reference model. A smaller value lets the policy move further. TRL:
    `beta`."""

    dpo_label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """`dpo`: assumed share of pairs whose preference label is wrong. TRL: `label_smoothing`."""

    gdpo_reward_keys: Annotated[tuple[Text, ...], _TUPLE] = ()
    """`gdpo`: names of the rewards that are normalised separately, in the mapping that the grader returns. `reward` is
    the sample's reward, and `overlong_penalty` the penalty for its length (docs/rewards.md). A sample without a number
    for one of these names fails. verl: `gdpo_reward_keys`."""

    gdpo_reward_weights: Annotated[tuple[float, ...] | None, _TUPLE] = None
    """`gdpo`: weight of each of these rewards; 1 each by default. verl: `gdpo_reward_weights`."""

    eps_clip: Annotated[float, _RATIOS] = Field(0.2, ge=0)
    """Lower clip range of the probability ratio. Where it and `eps_clip_high` are left out, `gspo` uses its paper's
    3e-4 and 4e-4, because the ratios of whole responses stay near 1, and `cispo` uses 1 and 4. For `dppo_tv` and
    `dppo_kl` it is the divergence above which a token that becomes less probable is left out, by default the paper's
    0.15 and 0.05 nats. slime: `--eps-clip`, 0.2 for all."""

    eps_clip_high: Annotated[float | None, _RATIOS] = Field(None, ge=0)
    """Upper clip range of the probability ratio; `eps_clip` by default. slime: `--eps-clip-high`."""

    eps_clip_c: Annotated[float | None, _RATIOS] = Field(None, gt=1)
    """Dual-clip bound on the loss of tokens with a negative advantage. slime: `--eps-clip-c`."""

    clip_cov_ratio: Annotated[float, _CLIP_COV] = Field(2e-4, gt=0, le=1)
    """`clip_cov`: share of an optimizer step's tokens that get no gradient, at least one token. They are drawn from
    those whose covariance of advantage and log-prob is between `clip_cov_lb` and `clip_cov_ub`. verl:
    `policy_loss.clip_cov_ratio`."""

    clip_cov_lb: Annotated[float, _CLIP_COV] = 1.0
    """`clip_cov`: lower bound of that covariance. verl: `policy_loss.clip_cov_lb`."""

    clip_cov_ub: Annotated[float, _CLIP_COV] = 5.0
    """`clip_cov`: upper bound of that covariance. verl: `policy_loss.clip_cov_ub`."""

    kl_cov_ratio: Annotated[float, _KL_COV] = Field(2e-4, gt=0, le=1)
    """`kl_cov`: share of an optimizer step's tokens that are penalised for moving, at least one token. These are the
    tokens with the highest covariance of advantage and log-prob. verl: `policy_loss.kl_cov_ratio`."""

    ppo_kl_coef: Annotated[float, _KL_COV] = Field(1.0, ge=0)
    """`kl_cov`: penalty of these tokens for each nat of the log-ratio. verl: `policy_loss.ppo_kl_coef`."""

    use_opsm: bool = False
    """Off-policy sequence masking (DeepSeek-V3.2): drop a response with a negative advantage from the loss once it is
    less probable by more than `opsm_delta` than under the behaviour policy, whose log-probs the rollout engine
    returned. slime: `--use-opsm`, which compares with the trainer's log-probs."""

    opsm_delta: Annotated[float, when("algorithm.use_opsm")] = Field(1e-4, ge=0)
    """`use_opsm`: threshold in nats per token. slime: `--opsm-delta`."""

    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus. slime: `--entropy-coef`."""

    use_kl_loss: bool = False
    """Add the KL divergence from the reference model to the loss. With `use_tis` each token's term is multiplied by the
    ratio of the current to the behaviour policy, so that it estimates the divergence over tokens that the current
    policy would sample. slime: `--use-kl-loss`."""

    kl_loss_coef: Annotated[float, when("algorithm.use_kl_loss")] = Field(0.0, ge=0)
    """Weight of the KL loss. slime: `--kl-loss-coef`."""

    kl_loss_type: Annotated[KLType | None, _READS_KL] = None
    """Estimator of the KL divergence from the reference model; by default `k2` in the loss and `k1` in the rewards. In
    the loss the gradient matters. That of `k2` is the divergence's own where the policy is the one that sampled. That
    of `k1` is 0 on average, so `k1` is rejected with a positive `kl_loss_coef`. That of `k3` and `low_var_kl` is the
    gradient of the reverse divergence KL(reference ‖ policy). In the rewards the value matters: `k1` and `k3` are
    unbiased. slime: `--kl-loss-type`."""

    use_unbiased_kl: Annotated[bool, when("algorithm.use_kl_loss")] = False
    """Multiply a token's KL loss by the ratio of the current to the behaviour policy, whose log-probs the rollout
    engine returned, and differentiate through the ratio (DeepSeek-V3.2). Value and gradient are then those of the
    divergence for `k3`, the default with this option, and for `k1`, even where the policy has moved since it sampled.
    slime: `--use-unbiased-kl`, which takes the ratio over the trainer's log-probs."""

    ref_update_interval: Annotated[int | None, _READS_KL, _SAMPLED] = Field(None, ge=1)
    """Number of iterations after which the current policy becomes the reference model: iteration i uses the weights
    from before iteration ⌊i / interval⌋ × interval. Null keeps the run's initial reference. slime:
    `--ref-update-interval`."""

    use_opd: Annotated[bool, _SAMPLED] = False
    """On-policy distillation: subtract from every token's advantage its log-prob under the policy minus that under the
    teacher, `model.teacher_path`, weighted by `opd_kl_coef`. slime: `--use-opd`."""

    opd_kl_coef: Annotated[float, when("algorithm.use_opd")] = Field(1.0, ge=0)
    """Weight of the reverse KL divergence from the teacher in advantages. slime: `--opd-kl-coef`."""

    distillation_loss_coef: Annotated[float, _SAMPLED] = Field(0.0, ge=0)
    """Weight of the loss `forward_kl_topk` when it is added to a loss that uses advantages. verl:
    `distillation_loss.distillation_loss_coef`."""

    distillation_topk: Annotated[int, _TOP_K] = Field(32, ge=1)
    """Number of the teacher's most probable tokens, at each token of a response, that are learned from. Their ids and
    log-probs are stored with the scores. verl: `distillation_loss.topk`."""

    use_rollout_logprobs: Annotated[bool, _SAMPLED] = False
    """Use the rollout engine's log-probs as those of the old policy instead of recomputing them. slime:
    `--use-rollout-logprobs`."""

    use_rollout_routing_replay: Annotated[bool, _SAMPLED] = False
    """Rollout routing replay for mixtures of experts (R3, arXiv 2510.11370): record the experts that the rollout engine
    chose for each token and make the trainer use the same ones, in the scores of the old policy and in every update.
    The trainer's router computes their weights. See docs/moe.md. slime: `--use-rollout-routing-replay`."""

    use_tis: Annotated[bool, _SAMPLED] = False
    """Correct for the difference between two log-probs by `custom_tis_function_path`: those of the proximal policy,
    which the trainer computes at the start of the update, and those of the behaviour policy, which the rollout engine
    returned. slime: `--use-tis`."""

    custom_tis_function_path: Annotated[Code, _TIS] = "tis"
    """Correction of `use_tis`. `tis`: truncated importance sampling. `icepop`: leaves out tokens whose ratio is outside
    the bounds. `mis`: either of these, for tokens or responses, with rejection besides, by the options below. Or a
    function of your own, `package.module.function` or `file.py:function`, see docs/plugins.md. slime:
    `--custom-tis-function-path`."""

    tis_clip: Annotated[float, _CORRECTED] = Field(2.0, gt=0)
    """Upper bound of the importance weight. slime: `--tis-clip`."""

    tis_clip_low: Annotated[
        float,
        _CORRECTED,
        when(
            "algorithm.reads_lower_bound",
            because="algorithm.tis_mode is truncate",
            remedy="set algorithm.tis_mode=clip",
        ),
    ] = Field(0.0, ge=0)
    """Lower bound of the importance weight. slime: `--tis-clip-low`."""

    tis_level: Annotated[RatioLevel, _TIS] = "token"
    """`mis`: ratio from which the weight is computed. `token`: of each token. `sequence`: product over a response.
    `geometric`: geometric mean over a response, whose bounds are near 1, such as 0.9999 and 1.0001. slime: `tis_level`
    of its mis example; verl: `rollout_is`."""

    tis_mode: Annotated[RatioMode, _TIS] = "truncate"
    """`mis`: use of the bounds. `truncate`: limits the ratio to at most `tis_clip`. `clip`: limits it to the range from
    `tis_clip_low` to `tis_clip`. `mask`: leaves out ratios outside this range. slime: `tis_mode` of its mis example."""

    use_rs: Annotated[bool, _TIS] = False
    """`mis`: leave out tokens or responses whose ratio is outside `rs_lower_bound` and `rs_upper_bound`. slime:
    `use_rs` of its mis example; verl: `rollout_rs`."""

    rs_level: Annotated[RatioLevel, _TIS, _RS] = "token"
    """`mis`: ratio that is compared with these bounds, as in `tis_level`. slime: `rs_level` of its mis example."""

    rs_lower_bound: Annotated[float | None, _TIS, _RS] = Field(None, ge=0)
    """`mis`: smallest ratio that is not rejected; `tis_clip_low` by default. slime: `rs_lower_bound` of its mis
    example."""

    rs_upper_bound: Annotated[float | None, _TIS, _RS] = Field(None, gt=0)
    """`mis`: largest ratio that is not rejected; `tis_clip` by default. slime: `rs_upper_bound` of its mis example."""

    rs_veto_threshold: Annotated[float | None, _TIS] = Field(None, gt=0, lt=1)
    """`mis`: leave out responses that have a token with a ratio below this, such as 1e-4. slime: `rs_veto_threshold` of
    its mis example."""

    tis_batch_normalize: Annotated[bool, _TIS] = False
    """Divide the weights by their mean over the optimizer step: over its tokens, or over its responses where
    `tis_level` is not `token`. Those that are left out do not count. The old policy's log-probs are then computed even
    for a single optimizer step, because the mean must be known before the first micro-batch. slime:
    `tis_batch_normalize` of its mis example; verl: `rollout_is_batch_normalize`."""

    get_mismatch_metrics: Annotated[bool, _SAMPLED] = False
    """Record the difference between trainer and rollout engine, whether or not it is corrected: perplexities,
    divergences, and the share of tokens whose ratio is outside `tis_clip_low` and `tis_clip`. With
    `use_rollout_logprobs` the trainer's log-probs are those of the update itself. Then nothing more is computed, and
    from the second optimizer step of an iteration on the difference includes the policy's own movement. slime:
    `--get-mismatch-metrics`."""

    custom_pg_loss_reducer_function_path: Annotated[Code, _SAMPLED] = "mean"
    """Reduction of the losses of tokens to that of the batch. `mean`: as the two options below say. Or a function of
    your own, `package.module.function` or `file.py:function`, see docs/plugins.md. slime:
    `--custom-pg-loss-reducer-function-path`."""

    calculate_per_token_loss: Annotated[bool, _SAMPLED] = False
    """Average the loss over all tokens of the batch instead of over samples. slime: `--calculate-per-token-loss`."""

    loss_scale_factor: Annotated[int | None, _SAMPLED] = Field(None, ge=1)
    """Divide the sum over a sample's trained tokens, in the policy loss, by this constant instead of by their number. A
    token then has the same weight in short and long responses; `rollout.rollout_max_response_len` is a natural choice.
    With `grpo_std_normalization` false this is Dr. GRPO. Metrics remain means over tokens. verl:
    `actor.loss_scale_factor` of `seq-mean-token-sum-norm`; slime: a reducer of one's own."""

    @property
    def learns_from(self) -> LearnsFrom:
        """Source of the responses on which the run trains."""
        if self.advantage_estimator == "dpo":
            return "preferences"
        return "demonstrations" if self.loss_type == "sft_loss" else "responses"

    @property
    def corrects_for_lag(self) -> bool:
        """Whether tokens of older weights may be trained on.

        They may where a correction or a ratio to the policy that sampled accounts for the difference, or where the loss
        is valid for tokens of any origin.
        """
        corrected = self.use_tis or self.use_rollout_logprobs or self.ratio_to_behaviour
        return corrected or self.loss_type == "forward_kl_topk"

    @property
    def ratio_to_behaviour(self) -> bool:
        """Whether the loss is a built-in one that uses the ratio to the policy that sampled, and none to the proximal
        policy."""
        if not self.names_a_loss:  # the losses that estimators declare have another ratio
            return False
        declaration = LOSS.built_in_declaration(self.loss_type)
        needs = frozenset() if declaration is None else declaration.needs
        return "rollout_log_probs" in needs and "old_log_probs" not in needs

    @property
    def upper_clip_range(self) -> float:
        """Upper clip range of the probability ratio."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def reads_kl(self) -> bool:
        """Whether the KL divergence from the reference model is computed, in the loss or in the rewards."""
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def learns_from_top_k(self) -> bool:
        """Whether a built-in loss uses the most probable tokens of a teacher."""
        return self.distillation_loss_coef > 0 or self.loss_type == "forward_kl_topk"

    @property
    def names_a_loss(self) -> bool:
        """Whether the loss is not the default one. The answer needs no import of the loss, which takes long."""
        return self.loss_type != AlgorithmConfig.model_fields["loss_type"].default

    @property
    def loss(self) -> str:
        """The loss in use: `loss_type`, or where that has its default, the loss that the estimator declares.

        Raises BadPlugin where the user's estimator is not available.
        """
        name = self.advantage_estimator
        if self.names_a_loss:
            return self.loss_type
        declaration = ESTIMATOR.declaration(name) if "." in name else ESTIMATOR.built_in_declaration(name)
        return (declaration and declaration.loss) or self.loss_type

    @property
    def reads_reference(self) -> bool:
        """Whether the reference model is read."""
        return self.reads_kl or self.learns_from == "preferences" or self.names_user_code

    @property
    def reads_teacher(self) -> bool:
        """Whether a teacher is read."""
        return self.use_opd or self.learns_from_top_k or self.names_user_code

    @property
    def trains_critic(self) -> bool:
        """Whether the estimator or loss needs values of a critic, as far as is known of user code."""
        estimator = ESTIMATOR.built_in_declaration(self.advantage_estimator)
        return estimator is None or "values" in estimator.needs or "." in self.loss_type

    @property
    def reads_lower_bound(self) -> bool:
        """Whether importance weights or the rejection of tokens have a lower bound."""
        rejects = self.use_rs and self.rs_lower_bound is None
        truncates = self.custom_tis_function_path == "mis" and self.tis_mode == "truncate" and not rejects
        return not truncates or self.get_mismatch_metrics

    @property
    def is_read_by_user_code(self) -> bool:
        return self.names_user_code

    def default_of(self, option: str) -> Any:
        return self.usual(option) if option in _CLIP_RANGE else super().default_of(option)

    @property
    def names_user_code(self) -> bool:
        """Whether the estimator or the loss is user code, whose needs are not known here."""
        return any("." in name for name in (self.advantage_estimator, self.loss_type))

    @property
    def kl_estimator(self) -> KLType:
        """The estimator that `kl_loss_type` names, or its default."""
        if self.kl_loss_type is not None or self.kl_coef > 0:
            return self.kl_loss_type or "k1"
        return "k3" if self.use_unbiased_kl else "k2"

    @property
    def rs_bounds(self) -> tuple[float, float]:
        """Smallest and largest ratio that is not rejected."""
        low = self.tis_clip_low if self.rs_lower_bound is None else self.rs_lower_bound
        return low, self.tis_clip if self.rs_upper_bound is None else self.rs_upper_bound

    def trains_actor(self, iteration: int) -> bool:
        """Whether an iteration trains the actor, and not the critic alone."""
        return iteration >= self.num_critic_only_steps

    def updates_reference(self, iteration: int) -> bool:
        """Whether the policy after an iteration becomes the reference of the next one."""
        return self.ref_update_interval is not None and (iteration + 1) % self.ref_update_interval == 0

    def usual(self, option: str) -> Any:
        """Return the value of an option that is left out: the default of a built-in loss that declares one, else the
        schema's default."""
        default, usual = type(self).model_fields[option].default, type(self).model_fields["loss_type"].default
        if self.names_user_code or self.loss == usual:
            return default
        declaration = LOSS.built_in_declaration(self.loss)
        return default if declaration is None else declaration.defaults.get(option, default)

    @classmethod
    def usual_clip_range(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return `eps_clip` and `eps_clip_high` of a section that leaves both out."""
        named = {key: section[key] for key in ("loss_type", "advantage_estimator") if isinstance(section.get(key), str)}
        chosen = cls.model_construct(**named)
        return {name: chosen.usual(name) for name in _CLIP_RANGE}

    @model_validator(mode="before")
    @classmethod
    def _fill_in_clip_range(cls, section: Any) -> Any:
        if not isinstance(section, Mapping) or section.keys() & {*_CLIP_RANGE}:
            return section
        return cls.usual_clip_range(section) | dict(section)

    @rule
    def _consistent(self) -> None:
        if self.use_rollout_logprobs and self.use_tis:
            raise ValueError(
                "use_rollout_logprobs (true) and use_tis (true) exclude each other: importance sampling corrects "
                "the difference between the two log-probs; set one of them to false"
            )
        if self.kl_loss_coef > 0 and self.kl_coef > 0:
            raise ValueError(
                f"kl_loss_coef ({self.kl_loss_coef}) and kl_coef ({self.kl_coef}) both keep the policy near the "
                "reference model, one in the loss and one in the rewards; set one of them to 0"
            )
        if self.loss_scale_factor is not None and self.calculate_per_token_loss:
            raise ValueError(
                f"loss_scale_factor ({self.loss_scale_factor}) and calculate_per_token_loss (true) exclude each other: "
                "both set the divisor of the sum over tokens; leave one of them out"
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
                "kl_loss_type (k2) is not an unbiased estimate, even with use_unbiased_kl (true); set "
                "kl_loss_type=k3, or leave one of them out"
            )
        estimator = ESTIMATOR.built_in_declaration(self.advantage_estimator)
        if self.names_a_loss and estimator is not None and estimator.loss not in (None, self.loss_type):
            raise ValueError(
                f"loss_type ({self.loss_type}) contradicts advantage_estimator ({self.advantage_estimator}), which is "
                f"trained with the loss {estimator.loss}; leave one of them out"
            )
        if self.loss_type == "dpo" and estimator is not None and self.advantage_estimator != "dpo":
            raise ValueError(
                "loss_type (dpo) needs the advantages of pairs, but advantage_estimator is "
                f"{self.advantage_estimator}; set advantage_estimator=dpo, which names its loss, and leave loss_type "
                "out"
            )
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        if self.advantage_estimator == "gdpo" and not keys:
            raise ValueError(
                "advantage_estimator (gdpo) normalises several rewards separately, but gdpo_reward_keys names none; "
                "set it to their names in the grader's result"
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
                f"advantage_estimator ({self.advantage_estimator}) compares a token with all others of the batch, but "
                "normalize_advantages is false; set normalize_advantages=true"
            )
        if self.kl_loss_coef > 0 and self.kl_loss_type == "k1" and not self.use_unbiased_kl:
            raise ValueError(
                f"kl_loss_type (k1) has a gradient of 0 on average as a loss, so kl_loss_coef ({self.kl_loss_coef}) "
                "would only add noise; set kl_loss_type=k2, whose gradient is that of the divergence, or penalise "
                "the divergence in the rewards, by kl_coef"
            )
