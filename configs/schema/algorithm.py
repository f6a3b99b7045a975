"""From rewards to a loss."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, ValidationInfo, model_validator

from cairn.configs.kinds import ESTIMATOR, LOSS, readers
from cairn.configs.schema.base import Section, is_recorded

KLType = Literal["k1", "k2", "k3", "low_var_kl"]


class AlgorithmConfig(Section):
    """Advantages and the policy loss."""

    loss_type: str = "policy_loss"
    """`policy_loss` is the clipped surrogate of PPO and GRPO, `sft_loss` the likelihood of demonstrations; or a
    function of your own, `package.module.function` or `file.py:function`. slime: `--loss-type`."""

    advantage_estimator: str = "grpo"
    """`grpo` compares a sample with its group; `ppo` trains a critic beside the actor and estimates advantages from its
    values; or a function of your own, `package.module.function` or `file.py:function`. slime:
    `--advantage-estimator`."""

    rewards_normalization: bool = True
    """`grpo`: subtract the group's mean reward. slime: on unless `--disable-rewards-normalization`."""

    grpo_std_normalization: bool = True
    """`grpo`: divide by the group's standard deviation. Off takes away the bias towards questions that nearly all
    samples get right or wrong; the loss still weighs a token by the length of its response, and with
    `loss_scale_factor` it is Dr. GRPO. slime: on unless `--disable-grpo-std-normalization`."""

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

    kl_loss_type: KLType | None = None
    """Estimator of the KL divergence from the reference model; by default `k2` in the loss and `k1` in the rewards.
    In the loss it is the gradient that counts: that of `k2` is the divergence's own where the policy is the one that
    sampled; that of `k1` is 0 on average, and it is refused with a positive `kl_loss_coef`; that of `k3` and
    `low_var_kl` is the gradient of the divergence of the policy from the view of the reference model,
    KL(reference ‖ policy). In the rewards it is the value that counts: `k1` and `k3` are unbiased. slime:
    `--kl-loss-type`."""

    use_opd: bool = False
    """On-policy distillation: lower every token's advantage by how much more probable it is to the policy than to the
    teacher, `model.teacher_path`. slime: `--use-opd`."""

    opd_kl_coef: float = Field(1.0, ge=0)
    """Weight of the reverse KL divergence from the teacher in advantages. slime: `--opd-kl-coef`."""

    use_rollout_logprobs: bool = False
    """Take the rollout engine's log-probs as those of the old policy instead of computing them again. slime:
    `--use-rollout-logprobs`."""

    use_tis: bool = False
    """Correct for the difference between the trainer's and the rollout engine's log-probs, by
    `custom_tis_function_path`. slime: `--use-tis`."""

    custom_tis_function_path: str = "tis"
    """How: `tis` is truncated importance sampling; or a function of your own, `package.module.function` or
    `file.py:function`, see docs/plugins.md. slime: `--custom-tis-function-path`."""

    tis_clip: float = Field(2.0, gt=0)
    """Upper bound of the importance weight. slime: `--tis-clip`."""

    tis_clip_low: float = Field(0.0, ge=0)
    """Lower bound of the importance weight. slime: `--tis-clip-low`."""

    custom_pg_loss_reducer_function_path: str = "mean"
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
    def reads_kl(self) -> bool:
        """Whether the KL divergence from the reference model is computed, in the loss or in the rewards."""
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def names_a_loss(self) -> bool:
        """Whether the loss is another one than by default. What one of ours declares takes long to import."""
        return self.loss_type != type(self).model_fields["loss_type"].default

    @property
    def names_user_code(self) -> bool:
        """Whether the estimator or the loss is the user's own, of which it is not known here what it needs."""
        return any("." in name for name in (self.advantage_estimator, self.loss_type))

    @property
    def kl_estimator(self) -> KLType:
        """The estimator that `kl_loss_type` names, or its default."""
        return self.kl_loss_type or ("k1" if self.kl_coef > 0 else "k2")

    def trains_actor(self, iteration: int) -> bool:
        """Whether an iteration trains the actor, or the critic alone."""
        return iteration >= self.num_critic_only_steps

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> "AlgorithmConfig":
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
        if self.tis_clip_low > self.tis_clip:
            raise ValueError(f"tis_clip_low ({self.tis_clip_low}) is above tis_clip ({self.tis_clip})")
        if is_recorded(info):
            return self
        changed = {name: value for name, value in self if value != type(self).model_fields[name].default}
        for name, why, way_out in self._without_effect() if changed and not self.names_user_code else ():
            if name in changed:
                value = changed[name]
                shown = str(value).lower() if isinstance(value, bool) else value
                raise ValueError(f"{name} ({shown}) has no effect while {why}; {way_out}, or leave it out")
        if self.kl_loss_coef > 0 and self.kl_loss_type == "k1":
            raise ValueError(
                f"kl_loss_type (k1) has a gradient of 0 on average as a loss, so kl_loss_coef ({self.kl_loss_coef}) "
                "would add noise alone; set kl_loss_type=k2, whose gradient is that of the divergence, or hold the "
                "policy to the reference model in the rewards of advantage_estimator=ppo, by kl_coef"
            )
        return self

    def _without_effect(self) -> Iterator[tuple[str, str, str]]:
        """Options that nothing of ours reads in this combination, why, and what would have them read."""
        yield from self._unread_by_the_loss()
        yield from self._unread_by_the_estimator()
        if not self.rewards_normalization:
            yield "grpo_std_normalization", "rewards_normalization is false", "set rewards_normalization=true"
        if not self.use_kl_loss:
            yield "kl_loss_coef", "use_kl_loss is false", "set use_kl_loss=true"
        # Manifests name k1 whether anything reads it or not, and a fork begins with what its parent's says.
        if not self.reads_kl and self.kl_loss_type != "k1":
            yield "kl_loss_type", "use_kl_loss is false and kl_coef is 0", "set use_kl_loss=true"
        if not self.use_opd:
            yield "opd_kl_coef", "use_opd is false", "set use_opd=true"
        if not self.use_tis:
            for name in ("tis_clip", "tis_clip_low", "custom_tis_function_path"):
                yield name, "use_tis is false", "set use_tis=true"

    def _unread_by_the_loss(self) -> Iterator[tuple[str, str, str]]:
        if not self.names_a_loss:  # the default reads all
            return
        ours = LOSS.declaration_of_ours(self.loss_type)
        if ours is None:
            return
        why = f"loss_type is {self.loss_type}"
        if "advantages" not in ours.needs:
            aggregated = {"custom_pg_loss_reducer_function_path", "calculate_per_token_loss"}
            for name in type(self).model_fields.keys() - {"loss_type", *aggregated}:
                yield name, why, "choose a loss that follows advantages"
        for name, losses in readers(LOSS).items():
            if self.loss_type not in losses:
                yield name, why, f"set loss_type={' or '.join(losses)}"

    def _unread_by_the_estimator(self) -> Iterator[tuple[str, str, str]]:
        if ESTIMATOR.declaration_of_ours(self.advantage_estimator) is None:
            return
        for name, estimators in readers(ESTIMATOR).items():
            if self.advantage_estimator not in estimators:
                why = f"advantage_estimator is {self.advantage_estimator}"
                yield name, why, f"set advantage_estimator={' or '.join(estimators)}"
