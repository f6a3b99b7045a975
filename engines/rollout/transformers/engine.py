"""The rollout engine for any Hugging Face causal language model, on CPU or GPU, in this process."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.models.folders import eos_token_ids, load_causal_lm
from cairn.engines.models.published import published_parts, published_weights, saved_tensors
from cairn.engines.processes.fingerprint import TORCH, engine_environment
from cairn.engines.processes.numa import bind_beside_gpu
from cairn.engines.rollout.admission import Occupancy
from cairn.engines.rollout.plan import EnginePlan, Place
from cairn.engines.rollout.transformers import checks
from cairn.engines.rollout.transformers.batch import StopStrings
from cairn.engines.rollout.transformers.decoder import Decoder
from cairn.engines.rollout.transformers.loop import DecodeLoop
from cairn.engines.types.errors import BadModel, EngineError
from cairn.engines.types.types import Completion, GenerateRequest, Stream
from cairn.engines.weights.fingerprint import weights_checksum
from cairn.engines.weights.layout import MemoryTag, StoredVersion
from cairn.engines.weights.versions import HeldVersion
from cairn.storage.opening import open_store
from cairn.storage.records import Environment


class WeightUpdate:
    """An update of all weights of a model in place, sent in buckets.

    Weights have the names of weight files, or the names that they have in the model, where several experts may be one
    tensor. Tied weights count once, under any of their names.
    """

    def __init__(self, model: PreTrainedModel, version: int) -> None:
        self.version = version
        tensors = saved_tensors(model)
        parts = published_parts(model, tensors.items())
        self._targets = {part.name: part.of(tensor) for name, tensor in tensors.items() for part in parts[name]}
        self._missing = {*self._targets}
        names_of = {}
        """Names of the weights that a tensor of the model is made of, by the tensor's address."""
        for name, tensor in tensors.items():
            names_of[tensor.data_ptr()] = {part.name for part in parts[name]}
        self._made_of = {name: {name} for name in self._targets}
        for name, tensor in model.state_dict().items():
            self._targets.setdefault(name, tensor)
            self._made_of.setdefault(name, names_of[tensor.data_ptr()])

    @torch.no_grad()
    def load(self, named_tensors: dict[str, torch.Tensor]) -> None:
        """Copy a bucket into the model, cast to its dtype.

        Raises:
            EngineError: a name is unknown or a shape differs; nothing of the bucket was copied.
        """
        for name, tensor in named_tensors.items():
            if name not in self._targets:
                raise EngineError(f"The model has no weight {name}: trainer and rollout engine hold different models.")
            if tensor.shape != self._targets[name].shape:
                raise EngineError(
                    f"Weight {name} has shape {tuple(self._targets[name].shape)} here and {tuple(tensor.shape)} in the "
                    "update: trainer and rollout engine hold different models."
                )
        for name, tensor in named_tensors.items():
            self._targets[name].copy_(tensor)
            self._missing -= self._made_of[name]

    def complete(self) -> None:
        """Record that the model has all weights of the version."""
        self._missing = set()

    def end(self) -> None:
        """Check that the update is complete. Raises EngineError where a weight was never sent."""
        if self._missing:
            raise EngineError(
                f"The update to version {self.version} lacks {len(self._missing)} weights, the first of them "
                f"{min(self._missing)}: send every weight between begin and end."
            )


class TransformersEngine:
    """A `RolloutEngine` that decodes with the library's own forward pass.

    The engine owns its process: it sets PyTorch's number of threads. With one CPU thread its samples do not depend on
    what else is in the batch (see `cairn.engines.rollout.transformers.decoder`). `check_batch_invariance` tests whether
    that holds here.

    Args:
        model_path: folder in Hugging Face format; a tokenizer is needed for stop strings alone.
        config: read for `num_threads`, `dtype` and `max_running_requests`.
        device: "cpu", "cuda" or "cuda:N".

    Raises:
        BadModel: the folder cannot be used, or the model cannot be decoded with a key-value cache.
    """

    def __init__(self, model_path: str, config: RolloutConfig, device: str = "cpu") -> None:
        torch.set_num_threads(config.num_threads)
        if device != "cpu":
            bind_beside_gpu()
        self._model_path = model_path
        self._model = load_causal_lm(model_path, getattr(torch, config.dtype), device).requires_grad_(False)
        self._decoder = Decoder(self._model, config.max_running_requests)
        self._occupancy = Occupancy()
        self._loop = DecodeLoop(
            self._decoder, eos_token_ids(self._model), self._serving, self._occupancy, StopStrings(model_path)
        )
        self._serves: int | None = 0
        """Version that requests are generated with; during an update in flight, the one being loaded. None: there are
        no weights to generate with. Requests read it meanwhile, so an update in flight never sets it to None."""
        self._update: WeightUpdate | None = None
        self._held = HeldVersion(lambda: published_weights(self._model), lambda weights: self._updating().load(weights))
        self._released: set[MemoryTag] = set()
        self._batch_invariant: bool | None = None
        if problem := checks.find_decoding_error(self._decoder):
            raise BadModel(f"Model type {self._model.config.model_type} in {model_path} cannot be decoded: {problem}.")

    def open(self) -> Stream:
        return self._loop.open()

    def generate(self, requests: Sequence[GenerateRequest]) -> Stream:
        stream = self._loop.open()
        stream.submit(requests)
        return stream

    def abort(self) -> None:
        self._loop.abort()

    def get_weight_version(self) -> int | None:
        return None if self._update is not None else self._serves

    def begin_weight_update(self, version: int, in_flight: bool = False) -> None:
        if "weights" in self._released:
            raise EngineError("The memory of the weights was released: resume it before an update.")
        if in_flight:
            self._loop.pause()
        with nullcontext() if in_flight else self._occupancy.alone("update weights"):
            if self._update is not None:  # it may have changed some weights
                self._held.digest = None
            self._update = WeightUpdate(self._model, version)
            self._serves = version if in_flight else None

    def retracted(self) -> list[Completion]:
        return self._loop.retracted()

    def update_weights(self, named_tensors: dict[str, torch.Tensor]) -> None:
        self._held.digest = None
        self._updating().load(named_tensors)

    def update_weights_from_disk(self, folder: Path) -> None:
        update = self._updating()
        try:
            saved = load_causal_lm(folder, self._model.dtype)
        except BadModel as error:
            raise EngineError(f"The weights in {folder} cannot be loaded: {error}") from error
        self._held.digest = None
        update.load(saved_tensors(saved))

    def update_weights_from_store(self, store_url: str, versions: Sequence[StoredVersion]) -> None:
        update = self._updating()
        if self._held.advance(open_store(store_url), versions) is not None:
            update.complete()

    def end_weight_update(self) -> None:
        update = self._updating()
        update.end()
        self._serves, self._update = update.version, None
        self._loop.resume(update.version)

    def release_memory(self) -> None:
        with self._occupancy.alone("release its memory"):
            self._serves, self._update = None, None
            self._move_to("cpu")
            self._decoder.forget()
            self._released = {"weights", "kv_cache"}

    def resume_memory(self, tag: MemoryTag) -> None:
        if tag == "weights":
            self._move_to(self._decoder.device)
        self._released.discard(tag)

    def weights_checksum(self) -> str:
        return weights_checksum(published_weights(self._model).items())

    def check_batch_invariance(self) -> bool:
        with self._occupancy.alone("check batch invariance"):
            self._batch_invariant = checks.is_batch_invariant(self._decoder)
            return self._batch_invariant

    def batch_invariant(self) -> bool:
        return bool(self._batch_invariant)

    def environment(self) -> Environment:
        return engine_environment(self._decoder.device, TORCH)

    def usage(self) -> dict[str, int]:
        decoding = self._loop.decoding
        return {"running_requests_max": decoding.running_max, "queued_requests_max": decoding.queued_max}

    def health(self) -> dict[str, Any]:
        """Return the engine's state. Keys: model, model_type, dtype, device, num_threads, context_length,
        weight_version, released (memory), running_requests (samples being decoded now), tokens_generated,
        seconds (spent generating), batch_invariant (None before `check_batch_invariance`)."""
        return {
            "model": str(self._model_path),
            "model_type": self._model.config.model_type,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": str(self._decoder.device),
            "num_threads": torch.get_num_threads(),
            "context_length": self._decoder.context_length,
            "weight_version": self.get_weight_version(),
            "released": sorted(self._released),
            "running_requests": self._loop.decoding.running,
            "tokens_generated": self._loop.tokens,
            "seconds": self._loop.seconds,
            "batch_invariant": self._batch_invariant,
        }

    def _move_to(self, device: str | torch.device) -> None:
        """Move the weights."""
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            tensor.data = tensor.data.to(device)

    def _updating(self) -> WeightUpdate:
        if self._update is None:
            raise EngineError("No weight update has begun: call begin_weight_update first.")
        return self._update

    def _serving(self) -> int:
        """Return the version of the weights. Raises EngineError where there are none to generate with."""
        if self._released:
            raise EngineError("The engine's memory was released: resume it and update the weights before generating.")
        serves = self._serves
        if serves is None:
            raise EngineError("The engine is between begin and end of a weight update: end it before generating.")
        return serves


def make(model_path: str, config: RolloutConfig, plan: EnginePlan, place: Place, *limits: Any) -> TransformersEngine:
    """Make an engine for a fleet, and test its batch invariance. The limits of a server do not apply, because it is no
    server."""
    engine = TransformersEngine(model_path, config, plan.device)
    engine.check_batch_invariance()
    return engine
