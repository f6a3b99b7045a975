"""Interface of every training engine."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from cairn.engines.types.batches import BatchSource, ScoreWriter
from cairn.engines.types.types import ModelRole, Position, TrainBatch, TrainResult
from cairn.storage.records import Environment
from cairn.storage.store.store import Store, StoredFile

if TYPE_CHECKING:  # the driver names these methods, and loads no PyTorch
    import torch


class TrainingEngine(Protocol):
    """Rank of the worker that holds the trained weights and their optimizer.

    Where the algorithm needs them, the worker also holds the critic with its own optimizer, the reference and the
    teacher. Actor and critic are one state: one weight version, one digest, one checkpoint. Exported weights are the
    actor's.

    The constructor is `Engine(model, training, algorithm, *, temperature, total_steps, rank, world_size, device)`. It
    raises BadModel where the model's folder cannot be used. With more than one rank, every method is called on all
    ranks with the same arguments and takes part in collective communication. Each rank takes its own part of a batch
    that it receives as a whole, or reads its own part from a source. All ranks return the same unless stated
    otherwise.

    An update happens exactly once: the engine knows its current weight version and the input it was last trained on,
    and rejects an update that expects another version. Only `train` and `load` change weights. If one of them is
    interrupted between the first change and the last, every method except `load` and `health` raises EngineError until
    a checkpoint is loaded.
    """

    def position(self) -> Position:
        """Return the engine's weight version, state digest, last input digest and last result."""

    def train(
        self,
        batch: TrainBatch | BatchSource,
        *,
        num_steps: int,
        expected_version: int,
        input_digest: str,
        train_actor: bool = True,
        update_reference: bool = False,
    ) -> TrainResult:
        """Cut the batch into `num_steps` equal contiguous parts, in order, and take one optimizer step on each.

        Each step trains the actor and, where there is one, the critic. `train_actor=False` leaves the actor unchanged.
        `update_reference=True` then copies the actor's weights into the reference.

        Without `old_log_probs` the current policy replaces the old one, which is allowed only with a single step.
        Afterwards `position()` holds `input_digest` and the result.

        Raises:
            WrongVersion: the engine is not at `expected_version`; nothing was changed.
            ValueError: the batch cannot be trained on (a field is missing or has the wrong length, or a part has no
                trained token); nothing was changed.
            Damaged, StoreError: the source cannot be read; nothing was changed.
            NotFinite: the loss or gradient of a part is infinite or not a number. That step was not taken. If it was
                not the first, a checkpoint must be loaded.
        """

    def gradient_digests(self, batch: TrainBatch | BatchSource, *, num_steps: int) -> tuple[str, str]:
        """Compute the gradients of the batch's first optimizer step twice, for actor and critic. Return both digests.

        Nothing of the state changes. The arguments, and ValueError, are those of `train`.
        """

    def score(self, batch: TrainBatch, role: ModelRole) -> list[np.ndarray]:
        """Return [R_i] float32 for each sample: one score per response token.

        For the actor, the reference or the teacher, the scores are the response tokens' log-probs at the rollout's
        temperature. For the critic, they are the values of each token's state, that is of the tokens before it. For a
        teacher whose most probable tokens the loss reads, the shape is [R_i, 1 + 2k]: see
        `cairn.engines.training.log_probs.top_rows`.

        Raises:
            ValueError: the configuration requires no model of that role.
        """

    def write_scores(self, batch: BatchSource, roles: Sequence[ModelRole], writer: ScoreWriter) -> Any:
        """Score a batch from a source under some models, as `score` does, and have the writer store all scores on rank
        0. Return what it returns on rank 0, None elsewhere. Raises as `train` does for a source."""

    def export_weights(
        self, bucket_bytes: int, *, on_device: bool = False, in_turn: bool = False
    ) -> "Iterator[dict[str, torch.Tensor]]":
        """Yield the weights in the training's number format, on the CPU or on the device, in buckets of at most
        `bucket_bytes`.

        Keys are the names used in weight files; tied weights appear once. A tensor, or on Megatron a module, larger
        than `bucket_bytes` is a bucket by itself. Rank 0 yields the buckets, or with `in_turn` every rank some of them.
        The others must also be iterated to the end.
        """

    def weights_checksum(self, dtype: Literal["float32", "bfloat16"] = "float32") -> str:
        """Return `weights_checksum` (see cairn.engines.weights.fingerprint) of the exported weights, as an engine holds
        them that stores the received weights in `dtype`."""

    def export_hf(self, folder: Path) -> None:
        """Write the weights, config and generation config as a model folder in Hugging Face format, on rank 0."""

    def copy_state(self) -> int:
        """Begin to copy this rank's part of the state to the host, in place of an earlier copy. Return its size in
        bytes. Whatever changes or moves the state waits until it is copied."""

    def write_copy(self, store: Store, folder: str) -> list[StoredFile]:
        """Write the copy's files below `folder`; its index is the last. Another thread may train meanwhile, and calls
        of other ranks do not matter. Raises the store's errors, and EngineError without a copy."""

    def describe_copy(self, store: Store, folder: str, indexes: Sequence[StoredFile]) -> StoredFile:
        """Write the description of a checkpoint whose ranks have written these indexes. Raises as `write_copy` does."""

    def drop_copy(self) -> None:
        """Give the copy up. Its memory stays for the next one."""

    def save(self, store: Store, folder: str) -> list[StoredFile]:
        """Write the whole state below `folder`: copy, write and describe it. Return all files on rank 0 and none
        elsewhere. Raises the store's errors."""

    def load(self, store: Store, folder: str) -> None:
        """Replace the whole state by a saved one, of any layout of ranks.

        Raises:
            Damaged: a file is missing or altered, or the state's digest differs from the saved one.
        """

    def state_digest(self) -> str:
        """Return the digest of parameters, optimizer state and weight version, equal on every layout of ranks."""

    def environment(self) -> Environment:
        """Return the software and hardware that this rank computes on."""

    def health(self) -> dict[str, Any]:
        """Return rank, device, weight version and whether the state is intact; responds at once."""


@runtime_checkable
class Sharing(Protocol):
    """A training engine that can share its GPUs with rollout engines, in turn."""

    def offload(self) -> None:
        """Move the state to host memory; no effect if it is there already.

        Position, digest and the export of weights remain available. Everything else raises EngineError.
        """

    def onload(self) -> None:
        """Move the state back to the device, bit for bit; no effect if it is there already."""

    def export_on_device(self, bucket_bytes: int) -> "Iterator[dict[str, torch.Tensor]]":
        """Yield the buckets of `export_weights` on every rank, on its device, whether offloaded or not."""
