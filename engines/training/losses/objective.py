"""The loss of a micro-batch and its metrics, under slime's names."""

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from cairn.configs.kinds import CORRECTION, LOSS
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens, given
from cairn.engines.training.corrections import Correction
from cairn.engines.training.kept import within
from cairn.engines.training.log_probs import entropy, token_log_probs
from cairn.engines.training.losses.forward_kl_topk import forward_kl
from cairn.engines.training.losses.kl import kl_divergence
from cairn.engines.training.losses.limits import bounded
from cairn.engines.training.losses.metrics import LARGEST
from cairn.engines.training.losses.mismatch import mismatch
from cairn.engines.training.losses.opsm import masked
from cairn.engines.training.losses.protocol import Loss
from cairn.engines.training.needs import is_policy_gradient

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
    if tokens.teacher_top_ids is not None:
        top = logits.gather(-1, tokens.teacher_top_ids) - normalizer.unsqueeze(-1)
        tokens = replace(tokens, top_log_probs=top)
    entropies = None
    if is_policy_gradient(algorithm):
        entropies = entropy(logits, normalizer, differentiable=algorithm.entropy_coef > 0)
    return loss_and_metrics(log_probs, entropies, tokens, algorithm)


def loss_and_metrics(
    log_probs: torch.Tensor, entropies: torch.Tensor | None, tokens: Tokens, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, Metrics]:
    """As `objective`, for an engine that computes these from its own logits.

    Args:
        log_probs: [T], of the trained tokens.
        tokens: with `top_log_probs` where the teacher's most probable tokens are known.
        entropies: [T], of the distributions they were drawn from; None for a loss that is no policy gradient.
    """
    current = log_probs.detach()
    tokens = tokens if tokens.old_log_probs is not None else replace(tokens, old_log_probs=current)
    token_losses, observed = _token_losses(log_probs, tokens, algorithm)
    if entropies is None:
        loss = tokens.weighted_sum(token_losses)
        return loss, {"loss": loss.detach(), **_means(observed, tokens)}
    old = given(tokens.old_log_probs)
    metrics: Metrics = {}
    trainer = current if algorithm.use_rollout_logprobs else old
    if algorithm.use_opsm:
        observed["opsm_clipfrac"] = masked(current, tokens, algorithm)
        token_losses = token_losses * (1 - observed["opsm_clipfrac"])
    if algorithm.use_tis:
        weights, corrected = correction_weights(tokens, algorithm)
        if tokens.mean_correction is not None:
            weights = weights / tokens.mean_correction
            corrected["tis_batch_norm"] = torch.full_like(weights, tokens.mean_correction)
        token_losses = token_losses * weights.detach()
        observed |= {**corrected, "ois": torch.exp(bounded(current - old))}
    if tokens.rollout_log_probs is not None:
        difference = (trainer - tokens.rollout_log_probs).abs()
        observed["train_rollout_logprob_abs_diff"] = difference
        metrics["train_rollout_logprob_abs_diff" + LARGEST] = functional.pad(difference, (0, 1)).amax()
    if algorithm.get_mismatch_metrics:
        observed |= mismatch(trainer, tokens, algorithm)

    loss = tokens.weighted_sum(token_losses)
    metrics["pg_loss"] = loss.detach()
    metrics["entropy_loss"] = tokens.mean(entropies.detach())
    if algorithm.entropy_coef > 0:
        loss = loss - algorithm.entropy_coef * tokens.weighted_sum(entropies)
    if algorithm.use_kl_loss:
        learned = log_probs if algorithm.kl_loss_coef > 0 else current
        behaviour = tokens.behaviour if algorithm.use_unbiased_kl else None
        kl = kl_divergence(learned, given(tokens.ref_log_probs), algorithm.kl_estimator, behaviour)
        if algorithm.use_tis and behaviour is None:
            kl = kl * torch.exp(bounded(current - tokens.behaviour))
        metrics["kl_loss"] = tokens.mean(kl.detach())
        if algorithm.kl_loss_coef > 0:
            loss = loss + algorithm.kl_loss_coef * tokens.weighted_sum(kl)
    if algorithm.distillation_loss_coef > 0:
        divergence, masses = forward_kl(tokens)
        observed |= {"distillation_loss": divergence, **masses}
        loss = loss + algorithm.distillation_loss_coef * tokens.weighted_sum(divergence)
    metrics["loss"] = loss.detach()
    return loss, metrics | _means(observed, tokens)


def _token_losses(log_probs: torch.Tensor, tokens: Tokens, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """[T] by `algorithm.loss`, and the metrics of each token. Raises BadPlugin where it returns anything else."""
    function: Loss = LOSS.load(algorithm.loss)
    return _per_token(function(log_probs, tokens, algorithm), len(log_probs), f"the loss {algorithm.loss!r}", "losses")


def correction_weights(tokens: Tokens, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """[T] by `algorithm.custom_tis_function_path`, and metrics. Raises BadPlugin as `_token_losses` does."""
    name = algorithm.custom_tis_function_path
    function: Correction = CORRECTION.load(name)
    return _per_token(
        function(tokens, algorithm), len(tokens.targets), f"the off-policy correction {name!r}", "weights"
    )


def _per_token(found: Any, count: int, who: str, what: str) -> tuple[torch.Tensor, Metrics]:
    try:
        values, observed = found
        fits = all(tensor.shape == (count,) for tensor in (values, *observed.values()))
    except (TypeError, ValueError, AttributeError):
        fits = False
    if not fits:
        raise BadPlugin(
            f"{who} returned something else than ({what}, metrics), the {what} and each metric a tensor of one number "
            f"for each of the {count} tokens: correct it"
        )
    return values, dict(observed)


def _means(observed: Metrics, tokens: Tokens) -> Metrics:
    return {name: tokens.mean(values.detach()) for name, values in observed.items()}
