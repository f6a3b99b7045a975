"""What the rest of Cairn asks of a rollout engine."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from cairn.engines.types.types import Completion, GenerateRequest, Stream
from cairn.engines.weights.layout import Layout, Meeting, MemoryTag, Receiver
from cairn.storage.records import Environment


class RolloutEngine(Protocol):
    """Samples responses with the current weights of the policy, for all who ask at the same time.

    Nothing is decoded while weights are being updated.
    """

    def open(self) -> Stream:
        """A way to ask for samples, one by one or many at a time."""

    def generate(self, requests: Sequence[GenerateRequest]) -> Stream:
        """A stream with these requests, earlier ones first where possible.

        A sample that is continued goes on as if it had never been interrupted but for other weights. Raises as
        `Stream.submit` does.
        """

    def abort(self) -> None:
        """End soon, from any thread, what all open streams and calls of `generate` are at: they give each unfinished
        sample with the tokens that it has, none where it has not begun, and finish reason ABORT."""

    def get_weight_version(self) -> int | None:
        """Optimizer steps since the run's initial weights; None between the begin and the end of an update."""

    def begin_weight_update(self, version: int, in_flight: bool = False) -> None:
        """Start to replace all weights. Beginning again discards what an unfinished update has sent.

        `in_flight`: what is generated does not end: it is retracted and rests, what is asked for meanwhile too, until
        the update has ended, and goes on by reading all that there is of it again. Nothing of it is lost, and of its
        tokens each has the version that it was sampled from. An abort gives back what rests.

        Raises:
            EngineError: something is generated, and the update is not in flight.
        """

    def retracted(self) -> list[Completion]:
        """Of the samples that have not ended, what they had when an update in flight last retracted them, with finish
        reason ABORT; without those that had nothing. From any thread."""

    def update_weights(self, named_tensors: dict[str, torch.Tensor]) -> None:
        """Replace some weights, by their names in the Hugging Face model; any device and dtype.

        Raises:
            EngineError: no update has begun, a name is unknown, or a shape differs; nothing of the call is taken.
        """

    def update_weights_from_disk(self, folder: Path) -> None:
        """Replace all weights by those of a model folder in Hugging Face format.

        Raises:
            EngineError: no update has begun, or the folder is not of this model; the engine keeps refusing to generate.
        """

    def end_weight_update(self) -> None:
        """Serve the new weights under their version.

        Raises:
            EngineError: a parameter was not sent (tied ones count once); the engine keeps refusing to generate.
        """

    def weights_checksum(self) -> str:
        """`cairn.engines.weights.checksum.weights_checksum` of the weights under the names of weight files, tied ones
        once."""

    def check_batch_invariance(self) -> bool:
        """Try whether samples come out bit for bit the same alone and in several companies, on this very machine."""

    def batch_invariant(self) -> bool:
        """What `check_batch_invariance` found; False before it was asked."""

    def health(self) -> dict[str, Any]:
        """What the engine serves and how much it has done; values are JSON."""

    def environment(self) -> Environment:
        """What it computes on."""

    def usage(self) -> dict[str, int]:
        """Since the engine was last idle: `running_requests_max` and `queued_requests_max`, the most samples that it
        decoded, and had waiting, at a time. Where a server is asked for them now and then, the most that were seen."""

    def release_memory(self) -> None:
        """Give the memory of weights and cache to others; without effect on what is released already. From then on the
        weight version is None: weights have to be resumed and sent again, and the cache resumed, before it generates.

        Raises:
            EngineError: something is being generated.
        """

    def resume_memory(self, tag: MemoryTag) -> None:
        """Take memory back; without effect on what the engine has."""


@runtime_checkable
class DirectReceiver(Protocol):
    """A rollout engine whose processes take weights from the trainer themselves: as members of the group in which it
    broadcasts them, or from the memory of GPUs that they share."""

    def receiver(self) -> Receiver:
        """What it is in such a group."""

    def join_group(self, meeting: Meeting) -> None:
        """Meet the trainer and the other engines, in place of the group that it is in.

        Raises:
            EngineError: not all members came.
        """

    def receive_weights(self, layout: Layout) -> None:
        """Replace some weights, within an update, by one broadcast of them as bytes.

        Raises:
            EngineError: no update has begun, a name is unknown, or the broadcast broke off.
        """

    def map_weights(self, names: Collection[str], handles: Sequence[bytes]) -> None:
        """Replace some weights, within an update, by those that the trainer holds on the same GPUs.

        Args:
            handles: see `cairn.engines.weights.buckets`; one for each tensor-parallel rank.

        Raises:
            EngineError: no update has begun, or a name is unknown.
        """

    def leave_group(self) -> None:
        """Close the connections; without effect where there are none."""
