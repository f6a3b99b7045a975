"""The actors of a fleet: a process with one engine, to which it forwards what it is called for.

What an engine is made by is named, and imported where it is made, so that the driver loads no PyTorch.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import ray

from cairn.engines.deferred import collecting_later, defer_compiler
from cairn.engines.episodes.asking import Answers
from cairn.engines.episodes.records import Recorded
from cairn.engines.episodes.samples import SampleEngine
from cairn.engines.episodes.user_code import GenerateFunction
from cairn.engines.errors import EngineError
from cairn.engines.fleet.askers import Askers
from cairn.engines.fleet.fencing import Claim, FencedActor
from cairn.engines.fleet.slots import Slot
from cairn.engines.fleet.warm import THREADS
from cairn.engines.loopback import spare_loopback
from cairn.engines.ports import free_port
from cairn.engines.rollout.admission import Admission
from cairn.engines.rollout.streams import Stream
from cairn.engines.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types import GenerateRequest, SamplingParams


class EngineActor(FencedActor):
    """One engine, or one rank or machine's part of it, in a process that knows its slot: its machine, and the devices
    there that are its own. A method that the actor has not is the engine's."""

    def __init__(self, claim: Claim, num_threads: int, slot: Slot) -> None:
        """Called before PyTorch is imported, which reads the environment once. Threads that wait must not spin: on a
        machine that does something else too, spinning made small updates twenty times slower."""
        super().__init__(claim)
        found = ray.get_runtime_context().get_node_id()
        if found != slot.node:  # Ray moved the bundle after it was asked where it lies: the devices are others
            raise EngineError(f"this actor was to run on node {slot.node} and runs on {found}: it must be made again")
        if slot.gpu_ids:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpu_ids)
        forked_with = os.environ.get(THREADS, str(num_threads))
        if forked_with != str(num_threads):  # PyTorch is imported, and has read its number
            raise EngineError(
                f"this actor was to have {num_threads} threads and has {forked_with}: it must be made again"
            )
        spare_loopback()
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._slot = slot
        self._engine: Any = None

    def make(self, maker: str, *args: Any) -> None:
        """Make the engine. `maker`: `module:name` of what makes it of these arguments. Raises what that raises."""
        defer_compiler()
        module, _, name = maker.partition(":")
        with collecting_later():
            made_by = getattr(import_module(module), name)
        self._engine = made_by(*args)
        gc.freeze()  # what it begins with it keeps: a search for garbage, at any moment of a rollout, leaves that out

    def health(self) -> dict[str, Any]:
        """What the engine says of itself, and its process. Answers at once, also while the engine works."""
        return {**self._made.health(), "pid": os.getpid(), "node": self._slot.address, "slot": self._slot}

    def host(self) -> str:
        """Its machine's address within the cluster."""
        return self._slot.address

    def free_port(self, host: str) -> int:
        """See `cairn.engines.ports.free_port`."""
        return free_port(host)

    def model_digests(self, folders: Mapping[str, str], recorded: Mapping[str, str]) -> dict[str, str]:
        """Digests of model folders as this machine has them, by the names given to them. `recorded`: see
        `folder_digest`."""
        from cairn.engines.model_files import folder_digest

        return {name: folder_digest(Path(folder), recorded.get(name)) for name, folder in folders.items()}

    def _find(self, method: str) -> Callable[..., Any]:
        owner = self if hasattr(type(self), method) else self._made
        found: Callable[..., Any] = getattr(owner, method)
        return found

    @property
    def _made(self) -> Any:
        if self._engine is None:
            raise EngineError("the engine has not been started")
        return self._engine


class RolloutActor(EngineActor):
    """Of a rollout engine, and of the coroutines of samples, which run beside it."""

    def __init__(self, claim: Claim, num_threads: int, slot: Slot) -> None:
        super().__init__(claim, num_threads, slot)
        self._admission = Admission(None)
        self._samples = SampleEngine(self._open, lambda: self._made.abort())
        self._askers = Askers(self._open)

    def make(self, maker: str, *args: Any) -> None:
        """See `EngineActor.make`; of a model folder, a RolloutConfig, and more."""
        super().make(maker, *args)
        _, config, *_ = args
        self._admission = Admission(config.max_tokens_in_flight)

    def abort(self) -> None:
        """End what is being generated, and its stream."""
        self._samples.abort()
        self._made.abort()

    def join(self, samples: Sequence[SampleRequest]) -> bool:
        """See `cairn.engines.episodes.samples.SampleEngine`."""
        return self._samples.join(samples)

    def acknowledge(self, number: int) -> None:
        """What it streamed with this number is durable, and all before it."""
        self._samples.acknowledge(number)

    def usage(self) -> dict[str, int]:
        """See `cairn.engines.rollout.base` and `cairn.engines.rollout.admission`."""
        return {**self._made.usage(), **self._admission.usage()}

    def open_stream(self, asker: str) -> None:
        """See `cairn.engines.fleet.askers`, here and below."""
        self._askers.open_stream(asker)

    def ask(self, asker: str, requests: Sequence[GenerateRequest]) -> None:
        self._askers.ask(asker, requests)

    def take_answers(self, asker: str, seconds: float) -> Answers:
        return self._askers.take_answers(asker, seconds)

    def abort_stream(self, asker: str) -> None:
        self._askers.abort_stream(asker)

    def close_stream(self, asker: str) -> None:
        self._askers.close_stream(asker)

    def close_streams(self) -> None:
        self._askers.close_streams()

    def generate_samples(
        self, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction
    ) -> Iterator[list[GeneratedSample] | Recorded]:
        """See `cairn.engines.episodes.samples`."""
        yield from self._samples.generate(samples, params, function)

    def _open(self) -> Stream:
        return self._admission.open(self._made.open())


class EpisodesActor(EngineActor):
    """Of a worker in which episodes run: a name of its own, which lists of processes show."""


class RouterActor(EngineActor):
    """Of a router before rollout engines, likewise."""


class RewardModelActor(EngineActor):
    """Of the reward model, likewise."""


class TrainingActor(EngineActor):
    """Of a rank of the training engine, likewise."""
