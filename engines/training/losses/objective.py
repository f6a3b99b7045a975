"""The loss of a micro-batch and its metrics, under slime's names."""

import torch
from torch.nn import functional

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens
from cairn.engines.training.kept import within
from cairn.engines.training.log_probs import entropy, token_log_probs
from cairn.engines.training.losses.kl import kl_divergence
from cairn.engines.training.losses.limits import bounded
from cairn.engines.training.losses.metrics import LARGEST
from cairn.engines.training.losses.policy import policy_loss
from cairn.engines.training.losses.sft import sft_loss
from cairn.engines.training.losses.tis import importance_weights

Metrics = dict[str, torch.Tensor]


def objective(
    logits: torch.Tensor, tokens: Tokens, algorithm: AlgorithmConfig, temperature: float
) -> tuple[torch.Tensor, Metrics]:
    """This micro-batch's share of the loss (a scalar to be differentiated) and of every metric (detached scalars).

    Args:
        logits: [T, V], of the positions that predict the trained tokens.
        tokens: the T trained tokens.
        temperature: divides the logits, as it did in the rollout.
    """
    logits = logits.float() if temperature == 1 else logits.float() / temperature
    logits = within(logits, tokens.kept)
    normalizer = logits.logsumexp(-1)
    log_probs = token_log_probs(logits, normalizer, tokens.targets)
    if algorithm.loss_type == "sft_loss":
        return loss_and_metrics(log_probs, None, tokens, algorithm)
    entropies = entropy(logits, normalizer, differentiable=algorithm.entropy_coef > 0)
    return loss_and_metrics(log_probs, entropies, tokens, algorithm)


def loss_and_metrics(
    log_probs: torch.Tensor, entropies: torch.Tensor | None, tokens: Tokens, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, Metrics]:
    """As `objective`, for an engine that computes these from its own logits.

    Args:
        log_probs: [T], of the trained tokens.
        entropies: [T], of the distributions they were drawn from; None for loss_type=sft_loss, which has no use for it.
    """
    if entropies is None:
        loss = tokens.weighted_sum(sft_loss(log_probs))
        return loss, {"loss": loss.detach()}
    current = log_probs.detach()
    old = current if tokens.old_log_probs is None else tokens.old_log_probs
    ppo_kl = old - log_probs
    pg_loss, clipped = policy_loss(
        ppo_kl,
        _given(tokens.advantages),
        eps_clip=algorithm.eps_clip,
        eps_clip_high=algorithm.eps_clip_high,
        eps_clip_c=algorithm.eps_clip_c,
    )
    metrics: Metrics = {}
    per_token = {"pg_clipfrac": clipped, "ppo_kl": ppo_kl}
    if algorithm.use_tis:
        weights, ratio = importance_weights(
            old, _given(tokens.rollout_log_probs), low=algorithm.tis_clip_low, high=algorithm.tis_clip
        )
        pg_loss = pg_loss * weights
        per_token |= {"tis": ratio, "tis_clipfrac": (weights != ratio).float(), "ois": torch.exp(bounded(-ppo_kl))}
    if tokens.rollout_log_probs is not None:
        trainer = current if algorithm.use_rollout_logprobs else old
        difference = (trainer - tokens.rollout_log_probs).abs()
        per_token["train_rollout_logprob_abs_diff"] = difference
        metrics["train_rollout_logprob_abs_diff" + LARGEST] = functional.pad(difference, (0, 1)).amax()

    loss = tokens.weighted_sum(pg_loss)
    metrics["pg_loss"] = loss.detach()
    metrics["entropy_loss"] = tokens.mean(entropies.detach())
    if algorithm.entropy_coef > 0:
        loss = loss - algorithm.entropy_coef * tokens.weighted_sum(entropies)
    if algorithm.use_kl_loss:
        learned = log_probs if algorithm.kl_loss_coef > 0 else current
        kl = kl_divergence(learned, _given(tokens.ref_log_probs), algorithm.kl_estimator)
        metrics["kl_loss"] = tokens.mean(kl.detach())
        if algorithm.kl_loss_coef > 0:
            loss = loss + algorithm.kl_loss_coef * tokens.weighted_sum(kl)
    metrics["loss"] = loss.detach()
    metrics |= {name: tokens.mean(values.detach()) for name, values in per_token.items()}
    return loss, metrics


def _given(values: torch.Tensor | None) -> torch.Tensor:
    if values is None:
        raise ValueError("the batch lacks a field that its loss reads")
    return values
