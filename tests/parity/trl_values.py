"""Values of TRL's own loss of preferences: `.venv-trl/bin/python tests/parity/trl_values.py BATCH.json OUT.json`.

It is a method of a trainer that asks a model for log-probs: here one that says those of the batch. Two samples that
follow each other are a pair, of which the first is preferred. TRL smooths labels in its loss `aot` alone, which differs
from that of the paper by sorting the pairs: it gets them one by one.
"""

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from recording import OWN, Batch, Fields, record
from trl import DPOTrainer

SMOOTHED = "aot"


def compute(batch: Batch) -> dict[str, torch.Tensor | Fields]:
    """All cases."""
    pairs = range(0, len(batch.groups), 2)
    found: dict[str, torch.Tensor | Fields] = {}
    for name, apart in {"dpo": [[*pairs]], "dpo_smoothed": [[pair] for pair in pairs]}.items():
        log_probs = batch.padded("old_log_probs").requires_grad_()
        of_parts = [loss(batch, log_probs, part, smoothed=name == "dpo_smoothed") for part in apart]
        total = torch.stack(of_parts).mean()
        (gradient,) = torch.autograd.grad(total, log_probs)
        lengths = [len(field) for field in batch.of_tokens("loss_masks")]
        found[f"loss/{name}"] = total.detach()
        found[f"gradient/{name}"] = [row[:length] for row, length in zip(gradient, lengths, strict=True)]
    return found


def loss(batch: Batch, log_probs: torch.Tensor, preferred: list[int], *, smoothed: bool) -> torch.Tensor:
    """Of some pairs, by the places of their preferred samples."""
    samples = [*preferred, *(place + 1 for place in preferred)]
    masks, ref = batch.padded("loss_masks")[samples], batch.padded("ref_log_probs")[samples]
    ref_chosen, ref_rejected = (ref * masks).sum(1).chunk(2)
    prompts = torch.zeros(len(samples), 1)
    completion_mask = torch.cat([prompts, masks], 1).long()
    inputs = {
        "input_ids": torch.zeros_like(completion_mask),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    found: torch.Tensor = DPOTrainer._compute_loss(trainer(smoothed), FixedModel(log_probs[samples]), inputs, False)
    return found


class FixedModel(torch.nn.Module):
    """A model that returns fixed log-probs [N, T]; 0, as the fused head of TRL, where there is no label."""

    def __init__(self, log_probs: torch.Tensor) -> None:
        super().__init__()
        self._log_probs = log_probs

    def forward(self, *, labels: torch.Tensor, **_: Any) -> SimpleNamespace:
        """What the loss reads, and zeros for its metrics."""
        nothing = torch.zeros_like(self._log_probs)
        log_probs = self._log_probs.masked_fill(labels[:, 1:] == -100, 0)
        return SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())


def trainer(smoothed: bool) -> SimpleNamespace:
    """As much of a trainer as the method asks for."""

    def gathered(values: Any) -> Any:
        return values

    return SimpleNamespace(
        model=torch.nn.Identity(),
        accelerator=SimpleNamespace(device=torch.device("cpu"), gather=gathered, gather_for_metrics=gathered),
        beta=OWN["dpo_beta"],
        label_smoothing=OWN["dpo_label_smoothing"],
        loss_types=[SMOOTHED if smoothed else "sigmoid"],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        use_weighting=False,
        ld_alpha=None,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )


if __name__ == "__main__":
    record(Path(sys.argv[1]), Path(sys.argv[2]), "TRL", trl.__version__, compute)
