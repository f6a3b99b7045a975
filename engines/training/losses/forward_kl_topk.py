"""Distillation over the k most probable tokens of a teacher, on responses that the policy has sampled (Agarwal et al.
2024, "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes", section 3, with the forward
divergence; over k tokens as verl's `distillation_loss.loss_mode: forward_kl_topk`).

With p the teacher's distribution of the next token, and S its k most probable tokens:

    L_t = Σ_{v in S} p(v) (log p(v) - log π(v))

Neither p nor π is normalised over S, and their mass outside of S adds nothing. With k the whole vocabulary, L_t is
KL(p ‖ π). With a smaller k, its gradient with respect to the logit of v is m π(v) - p(v) 1[v in S], with m the
teacher's mass in S. Its minimum is m log m, where π is p / m in S and 0 outside. So L_t may be below 0. verl sets the
loss and its gradient to 0 there; this implementation does not, since there is still something to learn.
"""

import torch

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens, require_field
from cairn.engines.training.protocol import TokenLosses


@plugin(needs={"teacher_top_log_probs"})
def loss(log_probs: torch.Tensor, tokens: Tokens, config: AlgorithmConfig) -> TokenLosses:
    """Return [T] losses in nats."""
    return forward_kl(tokens)


def forward_kl(tokens: Tokens) -> TokenLosses:
    """Return [T] divergences in nats; the metrics are the mass of the policy and of the teacher in S."""
    teacher, student = require_field(tokens.teacher_top_log_probs), require_field(tokens.top_log_probs)
    probabilities = teacher.exp()
    student_mass = torch.where(probabilities > 0, student.detach().exp(), 0).sum(-1)
    return (probabilities * (teacher - student)).sum(-1), {
        "student_mass": student_mass,
        "teacher_mass": probabilities.sum(-1),
    }
