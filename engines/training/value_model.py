"""Critic: a causal language model with a value head, linear from the hidden size to 1, in place of its lm_head."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cairn.engines.models.folders import load_causal_lm, open_weights
from cairn.engines.types.errors import BadModel

WEIGHT, BIAS = "score.weight", "score.bias"
"""Names of the value head in a model folder, as transformers names the head of a token classifier."""

_STD = 0.02
_SEED = 1234


def value_head(folder: str | Path, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [1, hidden_size] weight and [1] bias, float32.

    These are the folder's own, or else a normal draw of standard deviation 0.02 and a bias of 0, the same for every
    layout of ranks and for every run.

    Raises:
        BadModel: the folder's head has another shape.
    """
    weight = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(_SEED)) * _STD
    head = {WEIGHT: weight, BIAS: torch.zeros(1)}
    for name, stored in open_weights(Path(folder)).items():
        if name in head:
            own = stored[...].float()
            if own.shape != head[name].shape:
                raise BadModel(
                    f"{name} in {folder} has shape {tuple(own.shape)}, but a critic needs {tuple(head[name].shape)}: "
                    "use a classifier with one label."
                )
            head[name] = own
    return head[WEIGHT], head[BIAS]


def load_value_model(
    folder: str | Path, dtype: torch.dtype, load: Callable[..., PreTrainedModel] = load_causal_lm
) -> PreTrainedModel:
    """Load a critic on the CPU, in evaluation mode; its `logits` are values, one per token.

    Args:
        load: `load_causal_lm`, or another function with its arguments.

    Raises:
        BadModel: see `cairn.engines.models.folders.load_causal_lm`.
    """
    model = load(folder, dtype, needs_head=False)
    config = model.config.get_text_config()
    weight, bias = value_head(folder, config.hidden_size)
    head = torch.nn.Linear(weight.shape[1], 1, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    model.set_output_embeddings(head)
    config.tie_word_embeddings = False
    if getattr(config, "final_logit_softcapping", None) is not None:
        config.final_logit_softcapping = None  # it bounds logits; values have no bound
    return model
