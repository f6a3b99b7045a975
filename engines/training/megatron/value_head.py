"""The critic's head on Megatron: linear from the hidden size to 1, where a policy has its output layer."""

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from cairn.engines.training.megatron.families.base import Family, Layout, Source

SOURCES = {
    "output_layer.weight": Source(Layout.REPLICATED, ("lm_head.weight",)),
    "output_layer.bias": Source(Layout.REPLICATED, ("lm_head.bias",)),
}
"""The names that the state gives them are those of the torch engine's."""


class ValueHead(torch.nn.Linear):
    """Stands on the last pipeline stage, whole on every tensor-parallel rank, and is called as Megatron's output layer.

    With sequence parallelism each rank values its own tokens: the values are gathered, and Megatron adds up the
    gradients of parameters that are marked so."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, dtype=config.params_dtype)
        self._tokens_are_cut = config.sequence_parallel
        marked: list[Any] = [self.weight, self.bias]
        for parameter in marked:
            parameter.sequence_parallel = self._tokens_are_cut

    def forward(
        self, input: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> Any:
        """[tokens, batch, hidden size] → ([all tokens, batch, 1], no bias); the other arguments are not for it."""
        values = super().forward(input)
        if self._tokens_are_cut:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def source_in_critic(family: Family, name: str) -> Source:
    """As `Family.parameter`, of a model with this head."""
    return SOURCES[name] if name in SOURCES else family.parameter(name)


def read_values(outputs: torch.Tensor, _: object) -> torch.Tensor:
    """[N] values of [N, 1] outputs."""
    return outputs.squeeze(-1)
