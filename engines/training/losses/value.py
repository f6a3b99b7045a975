"""Loss of the critic."""

import torch

from cairn.engines.training.collate import Tokens


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token and whether its value was clipped (1) or not (0).

    L = max((clip(V, V_old - value_clip, V_old + value_clip) - R)², (V - R)²), as in the code of Schulman et al. (2017),
    "Proximal Policy Optimization Algorithms" (openai/baselines, ppo2), without its factor 1/2.

    Args:
        values: [T] of the critic that is trained.
        old_values: [T] of the critic before the update.
        returns: [T].
    """
    clipped_values = old_values + (values - old_values).clamp(-value_clip, value_clip)
    clipped, unclipped = (clipped_values - returns).square(), (values - returns).square()
    # Without clipping the two differ only by rounding.
    was_clipped = ((values - old_values).abs() > value_clip) & (clipped > unclipped)
    return torch.maximum(clipped, unclipped), was_clipped.float()


def value_objective(
    outputs: torch.Tensor, tokens: Tokens, value_clip: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return this micro-batch's share of the critic's loss (a differentiable scalar) and of its metrics (detached).

    Args:
        outputs: [T, 1] of the value head, at the positions that predict the trained tokens.

    Raises:
        ValueError: the batch lacks values or returns.
    """
    if tokens.values is None or tokens.returns is None:
        raise ValueError("the batch lacks values or returns, which the critic's loss reads")
    loss, clipped = value_loss(outputs.float().squeeze(-1), tokens.values, tokens.returns, value_clip)
    share = tokens.value_loss(loss)
    return share, {"value_loss": share.detach(), "value_clipfrac": tokens.mean(clipped)}
