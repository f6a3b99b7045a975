"""Values of verl's own functions: `.venv-verl/bin/python tests/parity/verl_values.py BATCH.json OUT.json`."""

import sys
from pathlib import Path

import numpy as np
import torch
import verl
from recording import OWN, SEVERAL, Batch, Fields, record
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos as core
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

AGGREGATIONS = {
    "mean": "seq-mean-token-mean",
    "calculate_per_token_loss": "token-mean",
    "loss_scale_factor": "seq-mean-token-sum-norm",
}
"""Options here, and their names there."""


def actor(clip: str = "eps_clip", bound: float = 1e30) -> FSDPActorConfig:
    """verl always clips doubly; a bound that nothing reaches switches it off."""
    covariances = {name: OWN[name] for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio")}
    config = FSDPActorConfig(
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=OWN[clip],
        clip_ratio_low=OWN[clip],
        clip_ratio_high=OWN[f"{clip}_high"],
        clip_ratio_c=bound,
        policy_loss=PolicyLossConfig(ppo_kl_coef=OWN["ppo_kl_coef"], **covariances),
    )
    config.global_batch_info["loss_scale_factor"] = OWN["loss_scale_factor"]
    return config


def compute(batch: Batch) -> dict[str, torch.Tensor | Fields]:
    """All cases."""
    return {**advantages(batch), **losses(batch), **corrections(batch), **divergences(batch)}


def ragged(padded: torch.Tensor, mask: torch.Tensor, lengths: list[int]) -> Fields:
    """[T_i] of each sample, zeros at tokens of the environment."""
    return [row[:length] for row, length in zip(padded * mask, lengths, strict=True)]


def advantages(batch: Batch) -> dict[str, torch.Tensor | Fields]:
    """Of every response token."""
    mask, lengths = batch.padded("loss_masks"), [len(field) for field in batch.of_tokens("loss_masks")]
    index = np.array(batch.groups)
    rewards = torch.zeros_like(mask)
    last = [int(row.nonzero()[-1]) for row in mask]
    rewards[range(len(last)), last] = batch.of_samples("rewards")
    kl = core.kl_penalty(batch.padded("old_log_probs"), batch.padded("ref_log_probs"), "k1")
    lowered = rewards - OWN["kl_coef"] * kl * mask
    config = AlgoConfig(gamma=OWN["gamma"], lam=OWN["lambd"])
    raw: dict[str, torch.Tensor] = {
        "grpo": core.compute_grpo_outcome_advantage(rewards.clone(), mask, index)[0],
        "dr_grpo": core.compute_grpo_outcome_advantage(rewards.clone(), mask, index, norm_adv_by_std_in_grpo=False)[0],
        "rloo": core.compute_rloo_outcome_advantage(rewards.clone(), mask, index)[0],
        "rloo_kl": core.compute_rloo_outcome_advantage(lowered.clone(), mask, index)[0],
        "reinforce_plus_plus_baseline": core.compute_reinforce_plus_plus_baseline_outcome_advantage(
            rewards.clone(), mask, index
        )[0],
        "gdpo": core.compute_gdpo_outcome_advantage(
            rewards.clone(),
            mask,
            index,
            config=AlgoConfig(gdpo_reward_keys=list(SEVERAL), gdpo_reward_weights=list(SEVERAL.values())),
            non_tensor_batch={name: batch.of_samples(name).numpy() for name in SEVERAL},
            # A prompt of no token: verl puts each reward at a response's last one.
            batch={"prompts": mask[:, :0], "attention_mask": (mask * 0 + 1).long()},
        )[0],
    }
    for name, values in {"": rewards, "_kl": lowered}.items():
        found = core.compute_reinforce_plus_plus_outcome_advantage(values, mask, config=config)
        raw[f"reinforce_plus_plus{name}"], raw[f"reinforce_plus_plus{name}_returns"] = found
        found = core.compute_gae_advantage_return(values, batch.padded("values"), mask, OWN["gamma"], OWN["lambd"])
        raw[f"ppo{name}"], raw[f"ppo{name}_returns"] = found
    return {f"advantage/{name}": ragged(values, mask, lengths) for name, values in raw.items()}


def losses(batch: Batch) -> dict[str, torch.Tensor | Fields]:
    """Of the batch, and the gradients of its log-probs."""
    mask, lengths = batch.padded("loss_masks"), [len(field) for field in batch.of_tokens("loss_masks")]
    old = batch.padded("old_log_probs")
    per_sample = batch.of_samples("sample_advantages")[:, None].expand_as(old)
    per_token = batch.padded("advantages")
    cases = {
        "policy_loss": (core.compute_policy_loss_vanilla, per_token, actor()),
        "dual_clip": (core.compute_policy_loss_vanilla, per_token, actor(bound=OWN["eps_clip_c"])),
        "gspo": (core.compute_policy_loss_gspo, per_sample, actor()),
        "cispo": (core.compute_policy_loss_cispo, per_token, actor()),
        "dppo_tv": (core.compute_policy_loss_dppo_tv, per_token, actor("dppo_clip", 20.0)),
        "dppo_kl": (core.compute_policy_loss_dppo_kl, per_token, actor("dppo_clip", 20.0)),
        "clip_cov": (core.compute_policy_loss_clip_cov, per_token, actor()),
        "kl_cov": (core.compute_policy_loss_kl_cov, per_token, actor()),
    }
    found: dict[str, torch.Tensor | Fields] = {}
    for name, (function, advantages, config) in cases.items():
        for option, mode in AGGREGATIONS.items():
            log_probs = batch.padded("log_probs").requires_grad_()
            loss, _ = function(old, log_probs, advantages, mask, mode, config)
            (gradient,) = torch.autograd.grad(loss, log_probs)
            found[f"loss/{name}/{option}"] = loss
            found[f"gradient/{name}/{option}"] = ragged(gradient, mask, lengths)
    values = batch.padded("new_values").requires_grad_()
    loss, _ = core.compute_value_loss(
        values, batch.padded("returns"), batch.padded("values"), mask, OWN["value_clip"], "seq-mean-token-mean"
    )
    (gradient,) = torch.autograd.grad(loss, values)
    return found | {"loss/value/half": loss, "gradient/value/half": ragged(gradient, mask, lengths)}


def corrections(batch: Batch) -> dict[str, torch.Tensor | Fields]:
    """Weights of tokens against the rollout engine's distribution, and which tokens stay."""
    mask, lengths = batch.padded("loss_masks"), [len(field) for field in batch.of_tokens("loss_masks")]
    log_ratio = batch.padded("old_log_probs") - batch.padded("rollout_log_probs")
    low, high = OWN["tis_clip_low"], OWN["tis_clip"]
    weights = {
        "tis": compute_rollout_correction_weights(log_ratio, mask, "token", high),
        "tis_sequence": compute_rollout_correction_weights(log_ratio, mask, "sequence", high),
        "tis_normalized": compute_rollout_correction_weights(log_ratio, mask, "token", high, True),
        "tis_sequence_normalized": compute_rollout_correction_weights(log_ratio, mask, "sequence", high, True),
        "icepop": compute_rollout_correction_weights(log_ratio, mask, "token", f"{low}_{high}"),
        "mask_token": compute_rollout_rejection_mask(log_ratio, mask, "token_k1", f"{1 / high}_{1 / low}"),
        "mask_sequence": compute_rollout_rejection_mask(log_ratio, mask, "seq_sum_k1", f"{1 / high}_{1 / low}"),
        "mask_geometric": compute_rollout_rejection_mask(log_ratio, mask, "seq_mean_k1", f"{1 / high}_{1 / low}"),
    }
    return {f"correction/{name}": ragged(found[0], mask, lengths) for name, found in weights.items()}


def divergences(batch: Batch) -> dict[str, torch.Tensor | Fields]:
    """Estimates of the divergence from the reference model."""
    mask, lengths = batch.padded("loss_masks"), [len(field) for field in batch.of_tokens("loss_masks")]
    log_probs, ref = batch.padded("log_probs"), batch.padded("ref_log_probs")
    return {f"kl/{k}": ragged(core.kl_penalty(log_probs, ref, k), mask, lengths) for k in ("k1", "k2", "low_var_kl")}


if __name__ == "__main__":
    record(Path(sys.argv[1]), Path(sys.argv[2]), "verl", verl.__version__, compute)
