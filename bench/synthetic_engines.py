"""Engines without a model, for measurements of everything around engines. Not part of the product: `install` puts them
in place of a run's engines, in this process.

The rollout engine answers each request at once with random tokens and log-probs, as many as it may generate. The
training engine hashes its rank's rows of a batch, and its state is a digest of what it was trained on. Both hold one
small tensor in place of weights, which is published and received like any other.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from cairn.engines.training.rank import TrainingRank
from cairn.engines.types.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    ModelRole,
    Position,
    TrainBatch,
    TrainResult,
)
from cairn.storage.records import Environment
from cairn.storage.store.store import Store, StoredFile

ROUTES = "CAIRN_BENCH_ROUTES"
"""Environment variable with the routes of a token: `layers,top-k`."""

VOCABULARY = 384
"""Number of token ids of the model folder's tokenizer."""
_FIRST_ID = 8
"""Least id of a random token: those before it are special."""
_EXPERTS = 128
"""Number of experts of a layer."""
_ENVIRONMENT = Environment(device="none: a synthetic engine", threads=1, versions={})


def install() -> None:
    """Have the fleets that this process starts consist of synthetic engines."""
    from cairn.engines.fleet import rollout, training

    rollout.ENGINE = f"{__name__}:make_rollout_engine"
    training.RANK = f"{__name__}:SyntheticRank"


class _Answers:
    """The stream of one caller."""

    def __init__(self, engine: "SyntheticRolloutEngine") -> None:
        self._engine = engine
        self._open: deque[GenerateRequest] = deque()
        self._aborted = False

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._open.extend(requests)

    def __iter__(self) -> "_Answers":
        return self

    def __next__(self) -> list[Completion]:
        if not self._open:
            raise StopIteration
        request = self._open.popleft()
        if self._aborted:
            return [Completion.empty(request.request_id, FinishReason.ABORT)]
        return [self._engine.answer(request)]

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._open.clear()


class SyntheticRolloutEngine:
    """A `cairn.engines.rollout.base.RolloutEngine` that answers without computing."""

    def __init__(self) -> None:
        self._version: int | None = 0
        self._next: int | None = None
        self._streams: list[_Answers] = []
        routes = os.environ.get(ROUTES)
        self._routes = tuple(map(int, routes.split(","))) if routes else None

    def answer(self, request: GenerateRequest) -> Completion:
        """Return the answer to a request: random tokens of the greatest permitted number."""
        count = request.sampling_params.max_new_tokens - request.position
        draw = np.random.default_rng(request.seed)
        routed = None
        if self._routes is not None and request.sampling_params.return_routed_experts:
            read = len(request.input_ids) + count - 1
            routed = draw.integers(0, _EXPERTS, (read, *self._routes), dtype=np.uint8)
        assert self._version is not None
        return Completion(
            request_id=request.request_id,
            response_ids=draw.integers(_FIRST_ID, VOCABULARY, count, dtype=np.int32),
            log_probs=-draw.standard_exponential(count, np.float32),
            weight_versions=np.full(count, self._version, np.int32),
            finish_reason=FinishReason.LENGTH,
            seconds=0.0,
            routed_experts=routed,
        )

    def open(self) -> _Answers:
        self._streams = [stream for stream in self._streams if stream._open]
        stream = _Answers(self)
        self._streams.append(stream)
        return stream

    def generate(self, requests: Sequence[GenerateRequest]) -> _Answers:
        stream = self.open()
        stream.submit(requests)
        return stream

    def abort(self) -> None:
        for stream in self._streams:
            stream.abort()

    def get_weight_version(self) -> int | None:
        return self._version

    def begin_weight_update(self, version: int, in_flight: bool = False) -> None:
        self._version, self._next = None, version

    def retracted(self) -> list[Completion]:
        return []

    def update_weights(self, named_tensors: Any) -> None:
        """Take a bucket."""
        assert named_tensors

    def update_weights_from_disk(self, folder: Path) -> None:
        """Take a folder."""
        assert any(folder.iterdir())

    def end_weight_update(self) -> None:
        self._version, self._next = self._next, None

    def weights_checksum(self) -> str | None:
        return None

    def batch_invariant(self) -> bool:
        return True

    def check_batch_invariance(self) -> bool:
        return True

    def health(self) -> dict[str, Any]:
        return {"weight_version": self._version, "released": [], "synthetic": True}

    def environment(self) -> Environment:
        return _ENVIRONMENT

    def usage(self) -> dict[str, int]:
        return {"running_requests_max": 0, "queued_requests_max": 0}

    def release_memory(self) -> None:
        self._version = None

    def resume_memory(self, tag: str) -> None:
        """Do nothing: no memory was released."""


def make_rollout_engine(model_path: str, *arguments: Any) -> SyntheticRolloutEngine:
    """Make the engine in its actor."""
    return SyntheticRolloutEngine()


class SyntheticTrainingEngine:
    """A rank of a `cairn.engines.training.base.TrainingEngine` that trains nothing."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._version, self._digest = 0, "0" * 64
        self._last: tuple[str, TrainResult] | None = None
        self._copy = b""

    def position(self) -> Position:
        return Position(self._version, self._digest, *(self._last or (None, None)))

    def train(
        self, batch: TrainBatch, *, num_steps: int, expected_version: int, input_digest: str, **options: Any
    ) -> TrainResult:
        assert expected_version == self._version
        held, lengths = self._held(batch)
        rows = self._hash_rows(held)
        self._version += num_steps
        self._digest = hashlib.sha256(f"{self._digest} {input_digest} {self._version}".encode()).hexdigest()
        metrics = {"loss": 0.0, "grad_norm": 1.0, "rows_digest": float(int(rows[:8], 16))}
        result = TrainResult(self._version, self._digest, metrics, 0.0, sum(lengths))
        if "lengths" in {one.name for one in fields(result)} and self._rank == 0:
            result = replace(result, lengths=tuple(lengths))
        self._last = input_digest, result
        return result

    def gradient_digests(self, batch: TrainBatch, *, num_steps: int) -> tuple[str, str]:
        return ("0" * 64,) * 2

    def score(self, batch: TrainBatch, role: ModelRole) -> list[np.ndarray]:
        return [np.full(length, -1.0, np.float32) for length in batch.response_lengths]

    def write_scores(self, batch: Any, roles: Sequence[ModelRole], writer: Any) -> Any:
        reader = batch.reader()
        held, _ = self._read(reader)
        return writer.write(reader, held, {role: self.score(held, role) for role in roles}) if self._rank == 0 else None

    def export_weights(
        self, bucket_bytes: int, *, on_device: bool = False, in_turn: bool = False
    ) -> Iterator[dict[str, Any]]:
        if self._rank == 0:
            yield self._weights("float32")

    def weights_checksum(self, dtype: str = "float32") -> str:
        from cairn.engines.weights.fingerprint import weights_checksum

        return weights_checksum(self._weights(dtype).items())

    def _weights(self, dtype: str) -> dict[str, Any]:
        import torch

        return {"synthetic": torch.full((1024,), float(self._version), dtype=getattr(torch, dtype))}

    def export_hf(self, folder: Path) -> None:
        raise NotImplementedError("a synthetic engine has no model")

    def save(self, store: Store, folder: str) -> list[StoredFile]:
        """Write the state; code before checkpoints are copied calls this."""
        self.copy_state()
        return self.write_copy(store, folder) if self._rank == 0 else []

    def copy_state(self) -> int:
        self._copy = json.dumps({"version": self._version, "digest": self._digest}).encode()
        return len(self._copy)

    def write_copy(self, store: Store, folder: str) -> list[StoredFile]:
        return [_written(store, f"{folder}/synthetic-{self._rank}.json", self._copy)]

    def describe_copy(self, store: Store, folder: str, indexes: Sequence[StoredFile]) -> StoredFile:
        return _written(store, f"{folder}/synthetic.json", json.dumps([index.sha256 for index in indexes]).encode())

    def drop_copy(self) -> None:
        self._copy = b""

    def load(self, store: Store, folder: str) -> None:
        saved = json.loads(store.read(f"{folder}/synthetic-0.json"))
        self._version, self._digest, self._last = saved["version"], saved["digest"], None

    def state_digest(self) -> str:
        return self._digest

    def environment(self) -> Environment:
        return _ENVIRONMENT

    def health(self) -> dict[str, Any]:
        return {"rank": self._rank, "world_size": self._world_size, "weight_version": self._version, "intact": True}

    def _held(self, batch: Any) -> tuple[TrainBatch, list[int]]:
        """Return this rank's rows of a batch, and the tokens of all sequences."""
        if isinstance(batch, TrainBatch):  # code before ranks read their rows
            return batch, list(map(len, batch.input_ids))
        return self._read(batch.reader())

    def _read(self, reader: Any) -> tuple[TrainBatch, list[int]]:
        outline = reader.outline([reader.sizes(part) for part in range(reader.parts)])
        own = range(self._rank, len(outline), self._world_size)
        rows = [reader.rows(part, [own])[0] for part in range(reader.parts)]
        return reader.batch(rows, own), outline.tokens

    def _hash_rows(self, batch: TrainBatch) -> str:
        """Return the digest of this rank's rows of every field."""
        hashed = hashlib.blake2b()
        for field in fields(batch):
            values = getattr(batch, field.name)
            if isinstance(values, list):
                for value in values[self._rank :: self._world_size]:
                    if isinstance(value, np.ndarray):
                        hashed.update(np.ascontiguousarray(value))
        return hashed.hexdigest()


def _written(store: Store, path: str, data: bytes) -> StoredFile:
    store.write(path, data)
    return StoredFile(path, len(data), hashlib.sha256(data).hexdigest())


class SyntheticRank(TrainingRank):
    """A training rank with a synthetic engine. The ranks need not meet: they exchange nothing."""

    def listen(self) -> tuple[str, int]:
        return self._address, 0

    def start(
        self, model: Any, algorithm: Any, temperature: float, total_steps: int, rank: int, *where: Any, **options: Any
    ) -> None:
        self._rank = rank
        self._engine = SyntheticTrainingEngine(rank, self._training.world_size)  # type: ignore[assignment]
