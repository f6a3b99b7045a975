"""What every training engine offers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch

from cairn.engines.types.types import ModelRole, Position, TrainBatch, TrainResult
from cairn.storage.records import Environment
from cairn.storage.store.store import Store, StoredFile


class TrainingEngine(Protocol):
    """One rank of the worker that holds the trained weights, the optimizer and, where the algorithm needs them, the
    critic with its own optimizer, the reference and the teacher. Actor and critic are one state: one weight version,
    one digest, one checkpoint, and the weights that are exported are the actor's.

    It is built as `Engine(model, training, algorithm, *, temperature, total_steps, rank, world_size, device)` and
    raises BadModel where the model's folder cannot be used. Where there is more than one rank, every method is called
    on all of them with the same arguments and takes part in collective communication; each rank gets the whole batch
    and takes its own part of it, and all return the same unless said otherwise.

    An update happens exactly once: the engine knows the weight version it stands at and the input it was last trained
    on, and refuses an update that expects another version. Weights change in `train` and `load` alone; if one of them
    is interrupted between the first change and the last, every method but `load` and `health` raises EngineError until
    a checkpoint is loaded.
    """

    def position(self) -> Position:
        """Where the engine stands."""

    def train(
        self,
        batch: TrainBatch,
        *,
        num_steps: int,
        expected_version: int,
        input_digest: str,
        train_actor: bool = True,
        update_reference: bool = False,
    ) -> TrainResult:
        """Cut the batch into `num_steps` equal contiguous parts, in order, and take one optimizer step on each, with
        the actor and with the critic where there is one. `train_actor=False` leaves the actor as it is;
        `update_reference=True` makes the reference the actor as it is then.

        Without `old_log_probs` the current policy stands in for the old one, which one step alone allows. Afterwards
        `position()` carries `input_digest` and the result.

        Raises:
            WrongVersion: the engine does not stand at `expected_version`; nothing was changed.
            ValueError: the batch cannot be trained on (a field missing or of the wrong length, a part without a
                trained token); nothing was changed.
            NotFinite: the loss or gradient of a part is infinite or not a number; that step was not taken, and if it
                was not the first, a checkpoint must be loaded.
        """

    def score(self, batch: TrainBatch, role: ModelRole) -> list[np.ndarray]:
        """[R_i] float32 for each sample: its response tokens' log-probs under the actor, the reference or the teacher,
        at the rollout's temperature; of the critic, the value of each token's state, that is of what stands before the
        token. Of a teacher whose most probable tokens the loss reads, [R_i, 1 + 2k]: see
        `cairn.engines.training.log_probs`.

        Raises:
            ValueError: the configuration does not ask for a model of that role.
        """

    def export_weights(self, bucket_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        """The weights in the training's number format, by the names of weight files, tied ones once, on the CPU, in
        buckets of at most `bucket_bytes` (a larger tensor is a bucket by itself).

        Rank 0 yields them; the other ranks yield nothing but must be iterated to the end too.
        """

    def weights_checksum(self, dtype: Literal["float32", "bfloat16"] = "float32") -> str:
        """`weights_checksum` (see cairn.engines.weights.checksum) of the exported weights, after an engine that holds
        them in `dtype` has received them."""

    def export_hf(self, folder: Path) -> None:
        """Write the weights, config and generation config as a model folder in Hugging Face format, on rank 0."""

    def save(self, store: Store, folder: str) -> list[StoredFile]:
        """Write the whole state below `folder`; returns all files on rank 0, none elsewhere. Raises what the store
        raises."""

    def load(self, store: Store, folder: str) -> None:
        """Replace the whole state by a saved one, of any layout of ranks.

        Raises:
            Damaged: something is missing or altered, or the state's digest is not the one that was saved.
        """

    def state_digest(self) -> str:
        """Digest of parameters, optimizer state and weight version, equal on every layout of ranks."""

    def environment(self) -> Environment:
        """What this rank computes on."""

    def health(self) -> dict[str, Any]:
        """Rank, device, weight version and whether the state is intact; answers at once."""


@runtime_checkable
class Sharing(Protocol):
    """A training engine that can share its GPUs with rollout engines, in turn."""

    def offload(self) -> None:
        """Move the state to the host's memory; without effect where it is there already. Position, digest and the
        export of weights are still to be had, everything else raises EngineError."""

    def onload(self) -> None:
        """Move the state back, the same bit for bit; without effect where it is there already."""

    def export_on_device(self, bucket_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        """What `export_weights` gives out, on every rank and left on its device, offloaded or not."""
