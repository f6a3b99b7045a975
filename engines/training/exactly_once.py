"""Common part of all training engines: exactly-once updates and the state machine that guarantees them."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.processes.fingerprint import TORCH, engine_environment
from cairn.engines.training.aggregations import Weight, sequence_weights
from cairn.engines.training.batching import MicroBatch, check_batch, check_fields, check_steps, split_steps
from cairn.engines.training.checkpoint import Described, Holds, read_sealed
from cairn.engines.training.losses.objective import reads_whole_steps, with_whole_step
from cairn.engines.training.needs import has_critic
from cairn.engines.training.optimizer import learning_rate, weight_decay
from cairn.engines.training.parts import (
    FORMAT,
    HostCopy,
    NamedParts,
    PartsState,
    Saved,
    copy_to_host,
    read_parts,
    write_copy,
    write_description,
)
from cairn.engines.training.process import gathered
from cairn.engines.training.protocol import over_steps
from cairn.engines.training.rows import Rows
from cairn.engines.training.sharding import raising_together
from cairn.engines.types.batches import BatchOutline, BatchSource, ScoreWriter
from cairn.engines.types.errors import EngineError, NotFinite, WrongVersion
from cairn.engines.types.types import ModelRole, Position, TrainBatch, TrainResult
from cairn.engines.weights.fingerprint import fingerprint
from cairn.storage.records import Environment
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store, StoredFile


@dataclass(frozen=True)
class _OptimizerStep:
    """An optimizer step as this rank takes it."""

    trained: list[int]
    """All of its sequences that have a trained token."""
    micro_batches: list[MicroBatch]
    """Micro-batches of this rank."""
    weights: dict[int, Weight]
    """Weights of the trained tokens of each of its sequences."""


def _sequences(micro_batches: Iterable[MicroBatch]) -> set[int]:
    return {sequence for micro_batch in micro_batches for sequence in micro_batch.samples}


Scorer = Callable[[TrainBatch, Sequence[MicroBatch]], torch.Tensor]
"""(batch, this rank's micro-batches) → [sum of R_i] float32: one number for each response token, sample after sample,
the same on all ranks. A teacher may return [sum of R_i, 1 + 2k]."""

MISSING_MODEL_MESSAGES = {
    "ref": "the reference model is not loaded: set algorithm.use_kl_loss to have it",
    "teacher": "the teacher is not loaded: set algorithm.use_opd or distillation_loss_coef and model.teacher_path "
    "to have it",
    "critic": "there is no critic: set algorithm.advantage_estimator to ppo to have one",
}

_FINITE = ("loss", "value_loss", "grad_norm", "critic_grad_norm")
"""Metrics that must be finite before a step is taken."""


class Learner(Protocol):
    """The actor or the critic: a trained model with its optimizer. All ranks call its methods together."""

    def accumulate_gradients(
        self, batch: TrainBatch, micro_batches: Sequence[MicroBatch], weights: dict[int, Weight]
    ) -> dict[str, float]:
        """Set the gradients to those of the optimizer step's loss. Return its metrics, the same on all ranks.

        Args:
            micro_batches: this rank's micro-batches.
            weights: weights of each sample's trained tokens in the loss.
        """

    def gradients(self) -> Iterable[torch.Tensor]:
        """Return this rank's part of the gradients that `accumulate_gradients` set, in one order."""

    def grad_norm(self) -> float:
        """Return the norm of all gradients over all ranks, before clipping; infinite where they overflowed."""

    def step(self, lr: float, weight_decay: float) -> None:
        """Clip the gradients by the norm that `grad_norm` computed, and change the weights."""

    def forget_moments(self) -> None:
        """Set the optimizer's moments to zero."""

    def set_steps(self, steps: int) -> None:
        """Set the optimizer's step count, which determines the bias correction of its moments."""


class ExactlyOnceEngine(ABC):
    """The part of a `TrainingEngine` (see cairn.engines.training.base for the contract of every method) that does not
    depend on where models and optimizers live.

    A subclass names its learners and scorers by their roles, cuts samples into micro-batches and computes the digest of
    its state. Its own methods call `_require_ready` or `_require_intact` first.
    """

    _packages: Sequence[str] = TORCH
    """Packages that the engine computes with."""
    _description: ClassVar[str]
    """Name of the file that describes a checkpoint."""
    _older: ClassVar[Mapping[int, type[Described]]]
    """Descriptions of checkpoints in older formats."""
    _learners: Mapping[str, Learner]
    _scorers: Mapping[str, Scorer]

    def __init__(
        self,
        training: TrainingConfig,
        algorithm: AlgorithmConfig,
        *,
        total_steps: int,
        rank: int,
        world_size: int,
        device: str,
    ):
        """
        Args:
            total_steps: optimizer steps of the whole run, over which the learning rate decays by default.
            world_size: number of ranks; with more than one, a process group of that size must exist.
        """
        self._training, self._algorithm, self._total_steps = training, algorithm, total_steps
        self._rank, self._world_size = rank, world_size
        self._device = torch.device(device)
        self._dtype: torch.dtype = getattr(torch, training.dtype)
        self._version = 0
        self._digest: str | None = None
        self._last: tuple[str, TrainResult] | None = None
        self._interrupted: str | None = None
        self._offloaded = False
        self._copy: HostCopy | None = None
        timeout = timedelta(minutes=training.distributed_timeout_minutes)
        self._rows = Rows(rank, world_size, self._device, timeout)
        self._room: Sequence[torch.Tensor] = ()
        """Memory of the copy before, for the next one."""

    @abstractmethod
    def _plan(self, lengths: dict[int, int]) -> list[MicroBatch]:
        """Return this rank's micro-batches, as many as every other rank's.

        Args:
            lengths: tokens of every sample, by its index in the batch.
        """

    @abstractmethod
    def _compute_digest(self) -> str:
        """Return the digest of parameters and optimizer state of all learners and `_version`; all ranks take part."""

    @abstractmethod
    def _parts(self, *, owned: bool) -> NamedParts:
        """Return the parts of the state that this rank holds, as views; with `owned` those that it writes, of which no
        other rank writes any."""

    @abstractmethod
    def _has(self) -> Holds:
        """Return what the state consists of."""

    @abstractmethod
    def _load_older(self, store: Store, folder: str, state: Described) -> None:
        """Replace the state by one that an earlier version of Cairn wrote; see `load`."""

    def _filled(self) -> None:  # noqa: B027  (most engines have nothing to complete)
        """Complete a state of which the parts were replaced. All ranks take part."""

    @abstractmethod
    def _update_reference(self) -> None:
        """Copy the actor's current weights into the reference, which is then part of the state.

        Called only with `ref_update_interval`.
        """

    def position(self) -> Position:
        self._require_intact()
        input_digest, result = self._last or (None, None)
        return Position(self._version, self.state_digest(), input_digest, result)

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
        started = time.perf_counter()
        self._require_ready()
        if expected_version != self._version:
            raise WrongVersion(
                f"the training engine is at weight version {self._version}, not at {expected_version}; "
                "nothing was changed"
            )
        held, outline, steps = self._planned_steps(batch, num_steps, num_steps)
        self._began_at = self._version
        roles = [role for role in self._learners if train_actor or role != "actor"]
        if not roles:
            raise ValueError(MISSING_MODEL_MESSAGES["critic"] + ", or train the actor")
        # If one rank fails alone, the others stay blocked in a collective. With several ranks any failure may be so.
        self._interrupted = "train" if self._world_size > 1 else None
        try:
            metrics = [self._update(held, step, roles) for step in steps]
        except NotFinite:
            if self._version == expected_version:  # raised by all ranks, before the first change
                self._interrupted = None
            raise
        if update_reference:
            self._end_copying()
            self._interrupted = "train"
            self._update_reference()
            self._digest = None
        self._interrupted = None
        result = TrainResult(
            weight_version=self._version,
            state_digest=self.state_digest(),
            metrics=over_steps(metrics),
            seconds=time.perf_counter() - started,
            tokens=sum(outline.tokens),
            lengths=tuple(outline.tokens) if self._rank == 0 else (),
        )
        self._last = (input_digest, result)
        return result

    def gradient_digests(self, batch: TrainBatch | BatchSource, *, num_steps: int) -> tuple[str, str]:
        self._require_ready()
        held, _, (step,) = self._planned_steps(batch, num_steps, 1)
        self._interrupted = "gradient_digests" if self._world_size > 1 else None  # as in `train`
        held = with_whole_step(held, step.trained, self._algorithm)
        first, second = (self._gradient_digest(held, step) for _ in range(2))
        self._interrupted = None
        return first, second

    def score(self, batch: TrainBatch, role: ModelRole) -> list[np.ndarray]:
        self._require_ready()
        check_batch(batch)
        return self._scores(batch, self._scoring_plan(BatchOutline.of(batch)), role)

    def write_scores(self, batch: BatchSource, roles: Sequence[ModelRole], writer: ScoreWriter) -> Any:
        self._require_ready()
        reader = batch.reader()
        outline = self._rows.outline(reader)
        plan = self._scoring_plan(outline)
        held = self._rows.read(reader, _sequences(plan))
        scores = {role: self._scores(held, plan, role) for role in roles}
        return self._rows.together(lambda: writer.write(reader, held, scores) if self._rank == 0 else None)

    def state_digest(self) -> str:
        if self._digest is None:
            self._digest = self._compute_digest()
        return self._digest

    def copy_state(self) -> int:
        self._require_ready()
        digest = self.state_digest()
        self.drop_copy()
        room, self._room = self._room, ()
        self._copy = copy_to_host(
            self._parts(owned=True), rank=self._rank, weight_version=self._version, state_digest=digest, room=room
        )
        return self._copy.bytes

    def write_copy(self, store: Store, folder: str) -> list[StoredFile]:
        return write_copy(store, folder, self._held_copy())

    def describe_copy(self, store: Store, folder: str, indexes: Sequence[StoredFile]) -> StoredFile:
        copy = self._held_copy()
        path = f"{folder}/{self._description}"
        return write_description(
            store, path, indexes, weight_version=copy.weight_version, state_digest=copy.state_digest
        )

    def drop_copy(self) -> None:
        if (copy := self._copy) is not None:
            copy.wait()
            self._copy, self._room = None, copy.files

    def save(self, store: Store, folder: str) -> list[StoredFile]:
        written: list[StoredFile] = []
        with raising_together(self._world_size, self._device):
            self.copy_state()
            written = self.write_copy(store, folder)
        every = gathered(written, self._world_size)
        with raising_together(self._world_size, self._device):
            if self._rank == 0:
                written = [file for own in every for file in own]
                written.append(self.describe_copy(store, folder, [own[-1] for own in every]))
        self.drop_copy()
        return written if self._rank == 0 else []

    def load(self, store: Store, folder: str) -> None:
        self._require_onloaded()
        self._end_copying()
        with raising_together(self._world_size, self._device):
            state = read_sealed(store, folder, self._description, {FORMAT: PartsState, **self._older})
        if isinstance(state, PartsState):
            saved = Saved.open(store, folder, state, self._world_size, self._device)
            with raising_together(self._world_size, self._device):
                self._has().check(folder, saved.shapes)
            self._interrupted = "load"
            with torch.no_grad():
                read_parts(store, saved, self._parts(owned=False), self._world_size, self._device)
                self._filled()
        else:
            self._load_older(store, folder, state)
        self._end_load(folder, weight_version=state.weight_version, state_digest=state.state_digest)

    def environment(self) -> Environment:
        return engine_environment(self._device, self._packages)

    def health(self) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "world_size": self._world_size,
            "device": str(self._device),
            "weight_version": self._version,
            "intact": self._interrupted is None,
            "offloaded": self._offloaded,
        }

    def _planned_steps(
        self, batch: TrainBatch | BatchSource, num_steps: int, planned: int
    ) -> tuple[TrainBatch, BatchOutline, list[_OptimizerStep]]:
        """Return a batch with the sequences that this rank needs, its outline, and the first `planned` of its optimizer
        steps. Raises ValueError like `train`, on all ranks."""
        outline, read = self._opened(batch)
        steps = split_steps(outline.sample_of, num_steps)
        check_steps(outline, steps)
        plans = [self._planned(outline, samples) for samples in steps[:planned]]
        whole = reads_whole_steps(self._algorithm)
        needed = (set(plan.trained) if whole else _sequences(plan.micro_batches) for plan in plans)
        held = read(set().union(*needed))
        check_fields(held, num_steps, self._algorithm)
        return held, outline, plans

    def _opened(self, batch: TrainBatch | BatchSource) -> tuple[BatchOutline, Callable[[set[int]], TrainBatch]]:
        """Return the outline of a batch, and a function that returns it with at least some of its sequences."""
        if isinstance(batch, TrainBatch):
            check_batch(batch)
            return BatchOutline.of(batch), lambda own: batch
        reader = batch.reader()
        return self._rows.outline(reader), partial(self._rows.read, reader)

    def _planned(self, outline: BatchOutline, samples: range) -> _OptimizerStep:
        trained, divisors = ([field[i] for i in samples] for field in (outline.trained, outline.divisors))
        own = outline.sample_of[samples.start : samples.stop]
        weights = dict(zip(samples, sequence_weights(trained, own, self._algorithm, divisors), strict=True))
        lengths = {i: outline.tokens[i] for i, count in zip(samples, trained, strict=True) if count}
        return _OptimizerStep([*lengths], self._plan(lengths), weights)

    def _scoring_plan(self, outline: BatchOutline) -> list[MicroBatch]:
        sizes = zip(outline.tokens, outline.response_lengths, strict=True)
        lengths = {i: tokens for i, (tokens, response) in enumerate(sizes) if response}
        return self._plan(lengths) if lengths else []

    def _scores(self, batch: TrainBatch, plan: Sequence[MicroBatch], role: ModelRole) -> list[np.ndarray]:
        if role not in self._scorers:
            raise ValueError(MISSING_MODEL_MESSAGES[role])
        if not plan:
            return [np.zeros(0, np.float32) for _ in range(len(batch))]
        scores = self._scorers[role](batch, plan)
        return np.split(scores.cpu().numpy(), np.cumsum(batch.response_lengths)[:-1])

    def _update(self, batch: TrainBatch, step: _OptimizerStep, roles: Sequence[str]) -> dict[str, float]:
        """Take one optimizer step with some learners. Return its metrics.

        No weight changes before all gradients are computed and finite.
        """
        batch = with_whole_step(batch, step.trained, self._algorithm)
        metrics: dict[str, float] = {}
        for role in roles:
            metrics |= self._learners[role].accumulate_gradients(batch, step.micro_batches, step.weights)
            metrics[_of(role, "grad_norm")] = self._learners[role].grad_norm()
        self._require_finite(metrics)
        self._end_copying()
        self._interrupted = "train"
        for role in roles:
            lr, decay = self._rates(role)
            if self._training.reset_optimizer_states and self._version == self._began_at:
                self._learners[role].forget_moments()
            self._learners[role].set_steps(self._moments_seen(role))
            self._learners[role].step(lr, decay)
            metrics[_of(role, "lr")] = lr
        self._move_to(self._version + 1)
        return metrics

    def _gradient_digest(self, batch: TrainBatch, step: _OptimizerStep) -> str:
        """Return the digest of the gradients of all learners on all ranks."""
        parts = []
        for learner in self._learners.values():
            learner.accumulate_gradients(batch, step.micro_batches, step.weights)
            parts += [fingerprint(gradient) for gradient in learner.gradients()]
        return canonical.digest(gathered(torch.stack(parts).tolist(), self._world_size))

    def _untrained(self, role: str) -> int:
        """Return the number of optimizer steps at the start of the run in which a role is not trained."""
        waits = role == "actor" and has_critic(self._algorithm)
        return self._algorithm.num_critic_only_steps * self._training.num_steps_per_rollout if waits else 0

    def _steps_taken(self, role: str) -> int:
        """Return a role's optimizer steps so far.

        They depend on the weight version alone, like the rest of the state.
        """
        return max(0, self._version - self._untrained(role))

    def _moments_seen(self, role: str) -> int:
        """Return the number of optimizer steps that a role's moments have accumulated."""
        return self._version - self._began_at if self._training.reset_optimizer_states else self._steps_taken(role)

    def _rates(self, role: str) -> tuple[float, float]:
        """Return learning rate and weight decay of a role's next step."""
        training = self._training.of_critic if role == "critic" else self._training
        steps, total = self._steps_taken(role), self._total_steps - self._untrained(role)
        return learning_rate(training, steps, total), weight_decay(training, steps, total)

    def _end_load(self, folder: str, *, weight_version: int, state_digest: str) -> None:
        """Set the position to that of a loaded folder, once all of its tensors are in place.

        Raises:
            Damaged: the state's digest differs from the saved one.
        """
        self._move_to(weight_version)
        for role, learner in self._learners.items():
            learner.set_steps(self._steps_taken(role))
        self._last = None
        loaded = self.state_digest()
        if loaded != state_digest:
            raise Damaged(
                f"checkpoint {folder} is damaged: the loaded state has digest {loaded}, but {state_digest} was saved"
            )
        self._interrupted = None

    def _end_copying(self) -> None:
        """Wait until what `copy_state` began is copied. Whatever changes or moves the state calls this before."""
        if self._copy is not None:
            self._copy.wait()

    def _held_copy(self) -> HostCopy:
        if self._copy is None:
            raise EngineError("the training engine holds no copy of its state: it has to be copied again")
        return self._copy

    def _move_to(self, version: int) -> None:
        self._version, self._digest = version, None

    def _require_finite(self, metrics: dict[str, float]) -> None:
        if not all(math.isfinite(metrics[name]) for name in _FINITE if name in metrics):
            broken = ", ".join(f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value))
            raise NotFinite(
                f"the update of weight version {self._version} has {broken}; the weights are unchanged. Look at the "
                "batch's advantages and log-probs, or lower training.lr"
            )

    def _require_ready(self) -> None:
        self._require_intact()
        self._require_onloaded()

    def _require_onloaded(self) -> None:
        if self._offloaded:
            raise EngineError("the training engine is offloaded: onload it first")

    def _require_intact(self) -> None:
        if self._interrupted is not None:
            raise EngineError(
                f"the training engine was interrupted in {self._interrupted}(): its state is neither the old nor the "
                "new one; load a checkpoint"
            )


def _of(role: str, metric: str) -> str:
    """Return a role's name of a metric that every role has: the actor's has no prefix."""
    return metric if role == "actor" else f"{role}_{metric}"
