"""The interface of a rollout engine."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from cairn.engines.types.types import Completion, GenerateRequest, Stream
from cairn.engines.weights.layout import Layout, Meeting, MemoryTag, Receiver, StoredVersion
from cairn.storage.records import Environment

if TYPE_CHECKING:  # the driver names these methods, and loads no PyTorch
    import torch


class RolloutEngine(Protocol):
    """An engine that samples responses with the current weights of the policy, for several clients at the same time.

    Nothing is decoded while weights are being updated.
    """

    def open(self) -> Stream:
        """Open a stream, for requests of samples one by one or many at a time."""

    def generate(self, requests: Sequence[GenerateRequest]) -> Stream:
        """Return a stream with these requests, earlier ones first where possible.

        A continued sample resumes as if it had never been interrupted, except for other weights. Raises as
        `Stream.submit` does.
        """

    def abort(self) -> None:
        """Abort all open streams and calls of `generate` soon, from any thread. They return each unfinished sample with
        finish reason ABORT and the tokens that it has; a sample that has not begun has none."""

    def get_weight_version(self) -> int | None:
        """Return the number of optimizer steps since the run's initial weights; None between the begin and the end of
        an update."""

    def begin_weight_update(self, version: int, in_flight: bool = False) -> None:
        """Start to replace all weights. Beginning again discards what an unfinished update has sent.

        Args:
            in_flight: samples that are being generated do not end. They are retracted and paused until the update has
                ended, as are requests that come meanwhile. Then they resume after a fresh prefill. Nothing of them is
                lost, and each of their tokens has the version that it was sampled from. An abort returns paused
                samples.

        Raises:
            EngineError: samples are being generated, and the update is not in flight.
        """

    def retracted(self) -> list[Completion]:
        """Return what unfinished samples had when an update in flight last retracted them, with finish reason ABORT.
        Samples that had nothing are left out. May be called from any thread."""

    def update_weights(self, named_tensors: "dict[str, torch.Tensor]") -> None:
        """Replace some weights, by their names in the Hugging Face model; any device and dtype.

        Raises:
            EngineError: no update has begun, a name is unknown, or a shape differs; nothing of the call is applied.
        """

    def update_weights_from_disk(self, folder: Path) -> None:
        """Replace all weights by those of a model folder in Hugging Face format.

        Raises:
            EngineError: no update has begun, or the folder is not of this model; the engine keeps refusing to generate.
        """

    def update_weights_from_store(self, store_url: str, versions: Sequence[StoredVersion]) -> None:
        """Replace all weights by the last of `versions`, of which the first is whole and every other one a difference
        to the one before. An engine that holds one of them reads only those after it.

        Raises:
            EngineError: no update has begun, or the weights are not of this model.
            Damaged: a file is missing or altered.
        """

    def end_weight_update(self) -> None:
        """Serve the new weights under their version.

        Raises:
            EngineError: a parameter was not sent (tied ones count once); the engine keeps refusing to generate.
        """

    def weights_checksum(self) -> str | None:
        """Return `cairn.engines.weights.fingerprint.weights_checksum` of the weights that the last update brought,
        under the names of weight files. Tied weights count once. None where the engine cannot know it.

        Raises:
            WeightsDiffer: ranks of the engine received different weights.
        """

    def check_batch_invariance(self) -> bool:
        """Return whether samples are bit for bit the same alone and in several batches, as tested on this very
        machine."""

    def batch_invariant(self) -> bool:
        """Return the result of `check_batch_invariance`; False before its first call."""

    def health(self) -> dict[str, Any]:
        """Return what the engine serves and how much it has done; values are JSON."""

    def environment(self) -> Environment:
        """Return the environment that the engine computes on."""

    def usage(self) -> dict[str, int]:
        """Return the most samples that the engine decoded (`running_requests_max`) and had waiting
        (`queued_requests_max`) at a time since it was last idle. Where a server is polled for them, the most that were
        seen."""

    def release_memory(self) -> None:
        """Release the memory of weights and cache. Does nothing for memory that is released already. From then on the
        weight version is None: before the engine generates again, the weights must be resumed and sent, and the cache
        resumed.

        Raises:
            EngineError: samples are being generated.
        """

    def resume_memory(self, tag: MemoryTag) -> None:
        """Take memory back. Does nothing where the engine has it."""


@runtime_checkable
class DirectReceiver(Protocol):
    """A rollout engine whose processes take weights directly from the trainer: as members of the group in which the
    trainer broadcasts them, or from the memory of GPUs that they share."""

    def receiver(self) -> Receiver:
        """Return the engine's properties as a member of such a group."""

    def join_group(self, meeting: Meeting) -> None:
        """Join the group of the meeting, in place of the group that the engine is in.

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
        """Close the connections. Does nothing where there are none."""


class LoadChecked(Protocol):
    """A rollout engine that cuts and merges the weights that it receives."""

    def loaded_checksum(self) -> str:
        """Return a checksum of what all ranks hold after that. It is equal for engines of one layout with equal
        weights."""


class Routed(Protocol):
    """A rollout engine whose requests may go through a router."""

    def follow(self, router: str | None, servers: Sequence[str] = ()) -> None:
        """Send the requests of later calls of `generate` through a router, which may pass them to any of these servers;
        None: to the engine's own server."""


class Router(Protocol):
    """A router in front of the servers of rollout engines."""

    def serve(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Send requests to exactly these servers. Raises EngineError where the router does not take them."""

    def remove(self, url: str) -> None:
        """Send no more requests to a server."""
