"""What a loss is.

It gives every trained token a loss of its own, from which `cairn.engines.training.aggregations` makes that of the
batch, the same however samples are packed, cut into micro-batches and spread over ranks. Where it looks at the tokens
of a sample together, such as for the ratio of a whole response, it asks `tokens` for sums and means over samples: those
are exact and differentiable also where context parallelism leaves this process only a part of a sample.

The bonus for entropy, the divergences from the reference model and from a teacher and the correction of off-policy
tokens are options of their own, which come on top of any loss that reads advantages.
"""

from collections.abc import Mapping
from typing import Protocol

import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens

TokenLosses = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""The loss of each of T tokens; and metrics, also [T], whose means over the batch are recorded by their names."""


class Loss(Protocol):
    """From log-probs to the loss of each token."""

    def __call__(self, log_probs: torch.Tensor, tokens: Tokens, config: AlgorithmConfig, /) -> TokenLosses:
        """All ranks that hold parts of the same samples call it together, each with its own tokens, perhaps none: it
        must ask `tokens` for the same sums on all of them.

        Args:
            log_probs: [T] of the trained tokens, to be differentiated.
            tokens: the same tokens: what is known of them, and of the samples that they are of. Of what is not always
                there it holds what the loss needs (`cairn.plugin`).
        """
