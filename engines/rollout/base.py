"""What the rest of Cairn asks of a rollout engine."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from engines.types import Completion, GenerateRequest


class RolloutEngine(Protocol):
    """Samples responses with the current weights of the policy.

    One call of `generate` runs at a time, and none while weights are being updated.
    """

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        """Generate every sample of every request; yield each as it finishes, earlier requests first where possible.

        A sample that has a prefix goes on after it, as if it had never been interrupted but for other weights.

        Raises:
            RequestRefused: some of the requests cannot be served; nothing is generated.
            EngineError: another `generate` or a weight update is in progress, or the weights give no finite logits.
        """

    def abort(self) -> None:
        """End the running `generate` soon, from any thread: it yields each unfinished sample with the tokens that it
        has, none where it has not begun, and finish reason ABORT. Without a running one this does nothing."""

    def get_weight_version(self) -> int | None:
        """Optimizer steps since the run's initial weights; None between the begin and the end of an update."""

    def begin_weight_update(self, version: int) -> None:
        """Start to replace all weights. Beginning again discards what an unfinished update has sent."""

    def update_weights(self, named_tensors: dict[str, torch.Tensor]) -> None:
        """Replace some weights, by their names in the Hugging Face model; any device and dtype.

        Raises:
            EngineError: no update has begun, a name is unknown, or a shape differs; nothing of the call is taken.
        """

    def end_weight_update(self) -> None:
        """Serve the new weights under their version.

        Raises:
            EngineError: a parameter was not sent (tied ones count once); the engine keeps refusing to generate.
        """

    def weights_checksum(self) -> str:
        """`engines.weights.checksum.weights_checksum` of the parameters under their Hugging Face names, tied ones
        once."""

    def check_batch_invariance(self) -> bool:
        """Try whether samples come out bit for bit the same alone and in several companies, on this very machine."""

    def health(self) -> dict[str, Any]:
        """What the engine serves and how much it has done; values are JSON."""
