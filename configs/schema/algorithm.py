"""From rewards to a loss."""

from typing import Literal

from pydantic import Field, model_validator

from configs.schema.base import Section

KLType = Literal["k1", "k2", "k3", "low_var_kl"]


class AlgorithmConfig(Section):
    """Advantages and the policy loss."""

    loss_type: Literal["policy_loss", "sft_loss"] = "policy_loss"
    """slime: `--loss-type`."""

    advantage_estimator: Literal["grpo", "ppo"] = "grpo"
    """`grpo` compares a sample with its group; `ppo` trains a critic beside the actor and estimates advantages from its
    values. slime: `--advantage-estimator`."""

    rewards_normalization: bool = True
    """`grpo`: subtract the group's mean reward. slime: on unless `--disable-rewards-normalization`."""

    grpo_std_normalization: bool = True
    """`grpo`: divide by the group's standard deviation; off gives Dr. GRPO. slime: on unless
    `--disable-grpo-std-normalization`."""

    normalize_advantages: bool = False
    """Shift and scale the advantages of all trained tokens of an iteration to mean 0 and variance 1. slime:
    `--normalize-advantages`."""

    gamma: float = Field(1.0, gt=0, le=1)
    """`ppo`: discount of a token's reward for each token before it. slime: `--gamma`."""

    lambd: float = Field(1.0, ge=0, le=1)
    """`ppo`: λ of generalised advantage estimation; 1 trusts rewards alone, 0 the critic's next value alone. slime:
    `--lambd`."""

    kl_coef: float = Field(0.0, ge=0)
    """`ppo`: weight of the KL divergence from the reference model, by `kl_loss_type`, that every token's reward is
    lowered by. slime: `--kl-coef`."""

    value_clip: float = Field(0.2, ge=0)
    """`ppo`: how far a value may move from the one before the update until moving it further pays nothing. slime:
    `--value-clip`."""

    num_critic_only_steps: int = Field(0, ge=0)
    """`ppo`: iterations, from the run's first, in which the critic alone is trained. slime:
    `--num-critic-only-steps`."""

    eps_clip: float = Field(0.2, ge=0)
    """Lower clip range of the probability ratio. slime: `--eps-clip`."""

    eps_clip_high: float | None = Field(None, ge=0)
    """Upper clip range; `eps_clip` by default. slime: `--eps-clip-high`."""

    eps_clip_c: float | None = Field(None, gt=1)
    """Dual-clip bound on the loss where the advantage is negative. slime: `--eps-clip-c`."""

    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus. slime: `--entropy-coef`."""

    use_kl_loss: bool = False
    """Add the KL divergence from the reference model to the loss. slime: `--use-kl-loss`."""

    kl_loss_coef: float = Field(0.0, ge=0)
    """Weight of the KL loss. slime: `--kl-loss-coef`."""

    kl_loss_type: KLType = "k1"
    """Estimator of the KL divergence. slime: `--kl-loss-type`."""

    use_opd: bool = False
    """On-policy distillation: lower every token's advantage by how much more probable it is to the policy than to the
    teacher, `model.teacher_path`. slime: `--use-opd`."""

    opd_kl_coef: float = Field(1.0, ge=0)
    """Weight of the reverse KL divergence from the teacher in advantages. slime: `--opd-kl-coef`."""

    use_rollout_logprobs: bool = False
    """Take the rollout engine's log-probs as those of the old policy instead of computing them again. slime:
    `--use-rollout-logprobs`."""

    use_tis: bool = False
    """Truncated importance sampling between the trainer's and the rollout engine's log-probs. slime: `--use-tis`."""

    tis_clip: float = Field(2.0, gt=0)
    """Upper bound of the importance weight. slime: `--tis-clip`."""

    tis_clip_low: float = Field(0.0, ge=0)
    """Lower bound of the importance weight. slime: `--tis-clip-low`."""

    calculate_per_token_loss: bool = False
    """Average the loss over all tokens of the batch instead of over samples. slime: `--calculate-per-token-loss`."""

    @property
    def use_critic(self) -> bool:
        """Whether a critic is trained beside the actor."""
        return self.advantage_estimator == "ppo"

    @property
    def use_reference(self) -> bool:
        """Whether the reference model is scored."""
        return self.use_kl_loss or self.kl_coef > 0

    def trains_actor(self, iteration: int) -> bool:
        """Whether an iteration trains the actor, or the critic alone."""
        return iteration >= self.num_critic_only_steps

    @model_validator(mode="after")
    def _critic_is_used(self) -> "AlgorithmConfig":
        if self.use_critic:
            return self
        for name in ("gamma", "lambd", "kl_coef", "value_clip", "num_critic_only_steps"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} ({value}) has no effect while advantage_estimator is {self.advantage_estimator}; "
                    "set advantage_estimator=ppo, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> "AlgorithmConfig":
        if self.use_rollout_logprobs and self.use_tis:
            raise ValueError(
                "use_rollout_logprobs (true) and use_tis (true) exclude each other: importance sampling corrects "
                "the difference between the two log-probs; set one of them to false"
            )
        if self.kl_loss_coef > 0 and not self.use_kl_loss:
            raise ValueError(
                f"kl_loss_coef ({self.kl_loss_coef}) has no effect while use_kl_loss is false; set use_kl_loss=true"
            )
        if self.kl_loss_coef > 0 and self.kl_coef > 0:
            raise ValueError(
                f"kl_loss_coef ({self.kl_loss_coef}) and kl_coef ({self.kl_coef}) both hold the policy to the "
                "reference model, one in the loss and one in the rewards; set one of them to 0"
            )
        if self.opd_kl_coef != type(self).model_fields["opd_kl_coef"].default and not self.use_opd:
            raise ValueError(f"opd_kl_coef ({self.opd_kl_coef}) has no effect while use_opd is false; set use_opd=true")
        if self.tis_clip_low > self.tis_clip:
            raise ValueError(f"tis_clip_low ({self.tis_clip_low}) is above tis_clip ({self.tis_clip})")
        return self
