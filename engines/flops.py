"""Model FLOPs of an update, as model FLOPs utilization (MFU) counts them: Chowdhery et al., PaLM, 2022, appendix B.

A token of a sequence of T tokens takes 6 N + 12 L H Q T floating-point operations, forward and backward: N parameters
in matrix products, L layers of H heads of size Q. Of experts those that a token goes through count, and a table that
embeddings are looked up in does not. What is recomputed does not count, nor what LoRA spares: it is the work of the
model, not of the machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

from safetensors import safe_open

from cairn.engines.models import check_model_folder, parameter_names, weight_files


@dataclass(frozen=True)
class ModelSize:
    """What the FLOPs of a model follow from."""

    parameters: float
    """N."""
    attention: int
    """L · H · Q."""

    def training_flops(self, lengths: Sequence[int]) -> float:
        """Of one update on sequences of these lengths, in tokens."""
        return 6 * self.parameters * sum(lengths) + 12 * self.attention * sum(length**2 for length in lengths)


@cache
def model_size(path: str) -> ModelSize:
    """Of the model in a folder, read from the headers of its weight files. Raises BadModel."""
    config = check_model_folder(path).get_text_config()
    experts = next(
        (n for name in ("num_experts", "num_local_experts", "n_routed_experts") if (n := getattr(config, name, None))),
        1,
    )
    active = (getattr(config, "num_experts_per_tok", None) or experts) / experts
    names = parameter_names(path)
    has_head = "lm_head.weight" in names
    parameters = 0.0
    for file in weight_files(Path(path)):
        with safe_open(file, framework="numpy") as tensors:
            for name in names.intersection(tensors.keys()):
                shape = tensors.get_slice(name).get_shape()
                if len(shape) > 1 and not (has_head and name.endswith("embed_tokens.weight")):
                    parameters += prod(shape) * (active if ".experts." in name else 1)
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelSize(parameters, config.num_hidden_layers * heads * size)
