"""A reference that becomes the policy at an interval: no optimizer changes it, and yet it is a part of the state."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from cairn.engines.training.checkpoint import REFERENCE
from cairn.engines.training.megatron.fingerprints import Fingerprints, Piece, sharded_fingerprints
from cairn.engines.training.megatron.model import Model
from cairn.engines.training.megatron.state import State
from cairn.engines.training.megatron.weights import Ownership


class Reference:
    """This rank's part of it, cut as the actor is."""

    def __init__(self, model: Model) -> None:
        """All ranks take part."""
        self.chunks, self._parameters = model.chunks, model.parameters
        self._ownership = Ownership.agree(model.parameters)

    @torch.no_grad()
    def become(self, actor: State) -> None:
        """Take the actor's weights, in the number format of the passes."""
        for parameter, value in zip(self._parameters, actor.values, strict=True):
            parameter.value.copy_(value)

    def fingerprints(self) -> Fingerprints:
        """Of all whole tensors, as `cairn.engines.training.digest.state_digest` names them; all ranks take part."""
        kind, values = f"{REFERENCE}.", [parameter.value.detach() for parameter in self._parameters]

        def pieces() -> Iterator[Piece]:
            for parameter, value in zip(self._parameters, values, strict=True):
                blocks = [block for block in parameter.blocks if self._ownership.owner(block) == dist.get_rank()]
                yield Piece(kind, value.reshape(-1), 0, blocks)

        return sharded_fingerprints(
            pieces(), {kind: self._ownership.tensors()}, self._ownership, str(values[0].dtype), values[0].device
        )
