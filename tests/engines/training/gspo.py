"""Group sequence policy optimization as one who uses Cairn would write it: in a file of their own.

Zheng et al. 2025, "Group Sequence Policy Optimization", equations 5 to 7. With y_i a response and A_i its advantage,

    s_i = exp(1/|y_i| Σ_t (log π(y_it) - log π_old(y_it)))
    L_i = -min(s_i A_i, clip(s_i, 1 - eps_clip, 1 + eps_clip_high) A_i)

of which the loss of a batch is the mean over its samples.
"""

import torch

import cairn


@cairn.plugin(needs={"advantages", "old_log_probs"}, reads={"eps_clip", "eps_clip_high"})
def loss(log_probs, tokens, config):
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    ratios = tokens.means(log_probs - tokens.old_log_probs).exp()
    clipped = ratios.clamp(1 - config.eps_clip, 1 + high)
    advantages = tokens.means(tokens.advantages)
    losses = -torch.minimum(ratios * advantages, clipped * advantages)
    metrics = {"ratio": ratios, "pg_clipfrac": (ratios != clipped).float(), "group": tokens.groups.float()}
    return tokens.of_tokens(losses), {name: tokens.of_tokens(values) for name, values in metrics.items()}
