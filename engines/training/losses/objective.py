"""Loss of a micro-batch and its metrics, under slime's names."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from cairn.configs.kinds import CORRECTION, LOSS, declared
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.aggregations import NO_WEIGHT
from cairn.engines.training.collate import Tokens, collate_trained, require_field
from cairn.engines.training.corrections import Correction
from cairn.engines.training.limits import bounded
from cairn.engines.training.losses.forward_kl_topk import forward_kl
from cairn.engines.training.losses.kl import kl_divergence
from cairn.engines.training.needs import is_policy_gradient
from cairn.engines.training.protocol import LARGEST, Loss
from cairn.engines.training.vocabulary import WHOLE, Part, Softmax, evaluate
from cairn.engines.types.types import TrainBatch


def masked(log_probs: torch.Tensor, tokens: Tokens, algorithm: AlgorithmConfig) -> torch.Tensor:
    """Return [T]: 1 at the tokens that off-policy sequence masking excludes, 0 at the others.

    DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models" (2025), section 3.1: a token does
    not count if its advantage is negative and its response has become less probable by more than δ per token,

        1/|y| Σ_t (log π_old(y_t) - log π(y_t)) > opsm_delta

    where π_old is the behaviour policy, with the log-probs that the rollout engine returned. So the lag of the weights
    and the differences between the two engines count too.

    Args:
        log_probs: [T], detached.
    """
    moved = tokens.of_tokens(tokens.means(tokens.behaviour - log_probs))
    return ((require_field(tokens.advantages) < 0) & (moved > algorithm.opsm_delta)).float()


def mismatch(log_probs: torch.Tensor, tokens: Tokens, algorithm: AlgorithmConfig) -> dict[str, torch.Tensor]:
    """Return metrics of the mismatch between trainer and rollout engine, [T] each, under slime's names.

    Their means are recorded. With ρ_t = exp(trainer - rollout) of a token, and means over the T trained tokens of a
    response y:

    | metric | |
    |---|---|
    | mis_kl, mis_k3_kl | -log ρ_t and ρ_t - 1 - log ρ_t: estimates of KL(rollout ‖ trainer) |
    | mis_training_log_ppl, mis_training_ppl | -1/T log π(y) by the trainer, and its exponential |
    | mis_rollout_log_ppl, mis_rollout_ppl | the same by the rollout engine |
    | mis_log_ppl_diff, mis_log_ppl_abs_diff | 1/T Σ_t -log ρ_t, and its absolute value |
    | mis_ppl_ratio | exp(1/T Σ_t -log ρ_t) |
    | mis_chi2_token, mis_chi2_seq | ρ_t² - 1 and (Π_t ρ_t)² - 1: estimates of χ²(trainer ‖ rollout) |
    | mis_outside | 1 where ρ_t is outside of tis_clip_low and tis_clip |

    Exponents are clamped by `bounded`.

    Args:
        log_probs: [T] of the trainer, detached.
    """
    rollout = require_field(tokens.rollout_log_probs)
    log_ratios = log_probs - rollout
    training_ppl, rollout_ppl, apart = (
        tokens.of_tokens(tokens.means(values)) for values in (-log_probs, -rollout, -log_ratios)
    )
    whole = tokens.of_tokens(tokens.sums(log_ratios))
    ratios = torch.exp(bounded(log_ratios))
    outside = (ratios < algorithm.tis_clip_low) | (ratios > algorithm.tis_clip)
    return {
        "mis_kl": -log_ratios,
        "mis_k3_kl": torch.expm1(bounded(log_ratios)) - log_ratios,
        "mis_training_log_ppl": training_ppl,
        "mis_training_ppl": torch.exp(bounded(training_ppl)),
        "mis_rollout_log_ppl": rollout_ppl,
        "mis_rollout_ppl": torch.exp(bounded(rollout_ppl)),
        "mis_log_ppl_diff": apart,
        "mis_log_ppl_abs_diff": apart.abs(),
        "mis_ppl_ratio": torch.exp(bounded(apart)),
        "mis_chi2_token": ratios.square() - 1,
        "mis_chi2_seq": torch.exp(2 * bounded(whole)) - 1,
        "mis_outside": outside.float(),
    }


Metrics = dict[str, torch.Tensor]


def objective(
    logits: torch.Tensor,
    tokens: Tokens,
    algorithm: AlgorithmConfig,
    temperature: float,
    part: Part = WHOLE,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Return this micro-batch's share of the loss (a differentiable scalar) and of every metric (detached scalars).

    The backward pass overwrites the logits (`cairn.engines.training.vocabulary`).

    Args:
        logits: [T, V / ranks], at the positions that predict the trained tokens.
        tokens: the T trained tokens.
        temperature: divisor of the logits, as in the rollout.
        part: part of the vocabulary that this rank has.
        rows: [T] int64, where there are logits of further positions: the rows of the trained tokens.
    """
    softmax = Softmax(temperature, tokens.kept, rows, part)
    found = evaluate(logits, tokens.targets, softmax, entropy=is_policy_gradient(algorithm), ids=tokens.teacher_top_ids)
    if tokens.teacher_top_ids is not None:
        tokens = replace(tokens, top_log_probs=found.at_ids)
    return loss_and_metrics(found.log_probs, found.entropies, tokens, algorithm)


def loss_and_metrics(
    log_probs: torch.Tensor, entropies: torch.Tensor | None, tokens: Tokens, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, Metrics]:
    """Return the same as `objective`, from log-probs and entropies.

    Args:
        log_probs: [T], of the trained tokens.
        tokens: with `top_log_probs` where the teacher's most probable tokens are known.
        entropies: [T], of the distributions that the tokens were sampled from; None for a loss that is no policy
            gradient.
    """
    current = log_probs.detach()
    tokens = tokens if tokens.old_log_probs is not None else replace(tokens, old_log_probs=current)
    token_losses, observed = _token_losses(log_probs, tokens, algorithm)
    if entropies is None:
        loss = tokens.weighted_sum(token_losses)
        return loss, {"loss": loss.detach(), **_means(observed, tokens)}
    old = require_field(tokens.old_log_probs)
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
        kl = kl_divergence(learned, require_field(tokens.ref_log_probs), algorithm.kl_estimator, behaviour)
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
    """Return the [T] losses by `algorithm.loss` and the metrics of each token.

    Raises BadPlugin where the loss returns anything else.
    """
    function: Loss = LOSS.load(algorithm.loss)
    return _per_token(function(log_probs, tokens, algorithm), len(log_probs), f"the loss {algorithm.loss!r}", "losses")


def correction_weights(tokens: Tokens, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """Return the [T] weights by `algorithm.custom_tis_function_path` and metrics.

    Raises BadPlugin where the correction returns anything else.
    """
    name = algorithm.custom_tis_function_path
    function: Correction = CORRECTION.load(name)
    return _per_token(
        function(tokens, algorithm), len(tokens.targets), f"the off-policy correction {name!r}", "weights"
    )


def _per_token(returned: Any, count: int, who: str, what: str) -> tuple[torch.Tensor, Metrics]:
    try:
        values, observed = returned
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


# What a loss computes from a whole optimizer step. Every rank has the fields that it reads of all of the step's samples
# (`reads_whole_steps`), so all ranks compute the same, however the step is cut into micro-batches and spread over them.


def reads_whole_steps(algorithm: AlgorithmConfig) -> bool:
    """Return whether every rank needs the tokens of all sequences of an optimizer step, and not only of its own."""
    return algorithm.tis_batch_normalize or declared(LOSS.load(algorithm.loss)).picks is not None


def with_whole_step(batch: TrainBatch, sequences: Sequence[int], algorithm: AlgorithmConfig) -> TrainBatch:
    """Return the batch with what its loss computes from the `sequences` of an optimizer step that have a trained
    token."""
    if algorithm.tis_batch_normalize:
        batch = replace(batch, mean_correction=mean_weight(batch, sequences, algorithm))
    return with_picked(batch, sequences, algorithm)


def with_picked(batch: TrainBatch, sequences: Sequence[int], algorithm: AlgorithmConfig) -> TrainBatch:
    """Return the batch with the tokens that the loss picks, to treat them differently in an optimizer step.

    Returns the batch itself where the loss picks none. The loss picks from all trained tokens of the step, by their
    advantages and log-probs before the update.

    Raises BadPlugin where the loss does not pick by one bool for each token.
    """
    picks = declared(LOSS.load(algorithm.loss)).picks
    if picks is None:
        return batch
    assert batch.advantages is not None
    assert batch.old_log_probs is not None
    masks = [batch.loss_mask[i].astype(bool) for i in sequences]
    advantages, log_probs = (
        np.concatenate([field[i][mask] for i, mask in zip(sequences, masks, strict=True)])
        for field in (batch.advantages, batch.old_log_probs)
    )
    chosen = np.asarray(picks(advantages, log_probs, algorithm))
    if chosen.shape != advantages.shape or chosen.dtype != bool:
        raise BadPlugin(
            f"the loss {algorithm.loss!r} picks {chosen.dtype} of shape {chosen.shape}: return "
            f"[{len(advantages)}] bool, one for each trained token of the optimizer step"
        )
    picked = [np.zeros(length, bool) for length in batch.response_lengths]
    for i, mask, part in zip(sequences, masks, np.split(chosen, np.cumsum([m.sum() for m in masks])[:-1]), strict=True):
        picked[i][mask] = part
    return replace(batch, picked=picked)


def mean_weight(batch: TrainBatch, sequences: Sequence[int], algorithm: AlgorithmConfig) -> float:
    """Return the mean correction weight of an optimizer step, the divisor for `tis_batch_normalize`.

    The mean is over tokens, or over sequences where the weights are those of whole responses. Weights of 0 do not
    count; if there are no others, the mean is 1. It depends only on log-probs of the old policy and of the rollout
    engine.
    """
    unrouted = replace(batch, routed_experts=None)  # which takes the most memory, and changes no weight
    tokens = collate_trained(unrouted, sequences, [NO_WEIGHT] * len(sequences), torch.device("cpu"))
    weights, _ = correction_weights(tokens, algorithm)
    counted = (weights != 0).float()
    if algorithm.tis_level != "token":
        weights, counted = tokens.sums(weights), tokens.sums(counted)
        weights, counted = weights / counted.clamp(min=1), (counted > 0).float()
    total = float(counted.sum())
    return float(weights.double().sum()) / total if total else 1.0
