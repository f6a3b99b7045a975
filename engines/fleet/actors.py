"""The actors of a fleet: each is a process with one engine, to which it forwards calls.

The maker of an engine is named by a string and imported in the actor, so that the driver loads no PyTorch.
"""

import gc
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import ray

from cairn.engines.agents.episodes.in_process import Answers, OpenRequests
from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.fleet.fencing import Claim, FencedActor
from cairn.engines.fleet.keepers import Keepers
from cairn.engines.fleet.roles import Slot
from cairn.engines.fleet.warm import THREADS
from cairn.engines.processes.deferred import collecting_later, defer_compiler
from cairn.engines.processes.ports import bypass_proxy_for_loopback, free_port
from cairn.engines.rollout.admission import Admission
from cairn.engines.types.errors import EngineDied, EngineError, is_device_failure
from cairn.engines.types.trajectories import GeneratedSample, Recorded, SampleRequest
from cairn.engines.types.types import GenerateRequest, SamplingParams, Stream

# Streams of a rollout engine for clients in other processes: the workers in which episodes run.
#
# A client submits new requests and fetches completed ones in separate calls. A thread reads the client's stream, so
# that the engine keeps decoding between two calls.


class ClientStreams:
    """Streams of this process's engine, by client name. Methods may be called from any thread."""

    def __init__(self, open: Callable[[], Stream]) -> None:
        """`open`: opens a stream of the engine."""
        self._open_one = open
        self._streams: dict[str, _ClientStream] = {}
        self._lock = threading.Lock()

    def open_stream(self, name: str) -> None:
        """Open a stream for a client. `name` must differ from those of all clients, present and past."""
        with self._lock:
            self._streams[name] = _ClientStream(self._open_one())

    def submit(self, name: str, requests: Sequence[GenerateRequest]) -> None:
        """Submit requests, one sample each. `take_completions` returns refusals among the answers, and raises later
        errors. Raises EngineError where the stream is closed."""
        self._stream(name).submit(requests)

    def take_completions(self, name: str, seconds: float) -> Answers:
        """Return the answers since the last call. Waits for the first one for at most `seconds`, and returns nothing
        after that. Raises as `Stream` does."""
        return self._stream(name).take(seconds)

    def abort_stream(self, name: str) -> None:
        """Abort the client's requests. Does nothing where its stream is closed."""
        with self._lock:
            stream = self._streams.get(name)
        if stream is not None:
            stream.stream.abort()

    def close_stream(self, name: str) -> None:
        """Cancel the client's requests and close its stream. The engine runs none of them when this returns."""
        with self._lock:
            stream = self._streams.pop(name, None)
        if stream is not None:
            stream.close()

    def close_streams(self) -> None:
        """Close all streams."""
        for name in list(self._streams):
            self.close_stream(name)

    def _stream(self, name: str) -> "_ClientStream":
        with self._lock:
            stream = self._streams.get(name)
        if stream is None:
            raise EngineError(f"{name} requested more from the engine, but its stream is closed")
        return stream


class _ClientStream:
    """The stream of one client, with the answers that the client has not taken yet."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._requests = OpenRequests(stream)
        self._changed = threading.Condition()
        self._answers: Answers = []
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="client-stream", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._add_answers(self._requests.submit(requests))

    def take(self, seconds: float) -> Answers:
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self._error or self._closed, seconds)
            answers, self._answers = self._answers, []
            if not answers and self._error is not None:
                raise self._error
            if not answers and self._closed:
                raise EngineError("the stream was closed")
            return answers

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._requests.end()
        self.stream.close()
        self._thread.join()

    def _read(self) -> None:
        """Collect answers, in a thread of its own."""
        try:
            while self._requests.wait():
                self._add_answers(self._requests.answers())
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _add_answers(self, answers: Answers) -> None:
        if answers:
            with self._changed:
                self._answers += answers
                self._changed.notify_all()


class EngineActor(FencedActor):
    """A process with one engine, or with one rank's or one machine's part of it. The process knows its slot: its
    machine, and its own devices there. Calls of methods that the actor lacks go to the engine."""

    def __init__(self, claim: Claim, num_threads: int, slot: Slot) -> None:
        """Set the environment before PyTorch is imported, which reads it once. Waiting threads must not spin: on a
        machine with other work too, spinning made small updates twenty times slower."""
        super().__init__(claim)
        node = ray.get_runtime_context().get_node_id()
        if node != slot.node:  # Ray moved the bundle since its place was queried: the devices are others
            raise EngineError(f"this actor should run on node {slot.node}, but runs on {node}: it must be restarted")
        if slot.gpu_ids:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpu_ids)
        forked_with = os.environ.get(THREADS, str(num_threads))
        if forked_with != str(num_threads):  # PyTorch is imported, and has read its number
            raise EngineError(
                f"this actor should have {num_threads} threads, but has {forked_with}: it must be restarted"
            )
        bypass_proxy_for_loopback()
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._slot = slot
        self._engine: Any = None
        self._failure: str | None = None
        """Error of the GPU, after which the process is of no use."""

    def obey(self, claim: Claim, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method; see `FencedActor.obey`. Raises EngineDied on an error of the GPU, and from then on in
        `health`, so that the process is replaced like one that died."""
        try:
            return super().obey(claim, method, *args, **kwargs)
        except RuntimeError as error:
            self._check_device(method, error)
            raise

    def obey_streaming(self, claim: Claim, method: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Call a method that yields its results one by one. Raises as `obey` does."""
        try:
            yield from super().obey_streaming(claim, method, *args, **kwargs)
        except RuntimeError as error:
            self._check_device(method, error)
            raise

    def make(self, maker: str, *args: Any) -> None:
        """Make the engine by calling `maker` (`module:name`) with these arguments. Raises what the maker raises."""
        defer_compiler()
        module, _, name = maker.partition(":")
        with collecting_later():
            made_by = getattr(import_module(module), name)
        self._engine = made_by(*args)
        gc.freeze()  # these objects stay: garbage collections during a rollout skip them

    def health(self) -> dict[str, Any]:
        """Return the health of the engine and of its process. Returns at once, also while the engine works. Raises
        EngineDied after an error of the GPU."""
        if self._failure is not None:
            raise EngineDied(self._failure)
        return {**self._made.health(), "pid": os.getpid(), "node": self._slot.address, "slot": self._slot}

    def host(self) -> str:
        """Return the machine's address within the cluster."""
        return self._slot.address

    def free_port(self, host: str) -> int:
        """Return a free port; see `cairn.engines.processes.ports.free_port`."""
        return free_port(host)

    def model_digests(self, folders: Mapping[str, str], recorded: Mapping[str, str]) -> dict[str, str]:
        """Return digests of model folders on this machine, by name. `recorded`: see `folder_digest`."""
        from cairn.engines.models.files import folder_digest

        return {name: folder_digest(Path(folder), recorded.get(name)) for name, folder in folders.items()}

    def _check_device(self, method: str, error: RuntimeError) -> None:
        """Raise EngineDied in place of an error of the GPU."""
        if is_device_failure(error):
            self._failure = f"{method}(): the GPU failed, and the process with it: {error}"
            raise EngineDied(self._failure) from error

    def _find(self, method: str) -> Callable[..., Any]:
        owner = self if hasattr(type(self), method) else self._made
        return getattr(owner, method)

    @property
    def _made(self) -> Any:
        if self._engine is None:
            raise EngineError("the engine has not been started")
        return self._engine


class RolloutActor(EngineActor, ClientStreams, Keepers):
    """A rollout engine, the coroutines of samples, which run next to it, and the keepers that take the samples."""

    def __init__(self, claim: Claim, num_threads: int, slot: Slot) -> None:
        EngineActor.__init__(self, claim, num_threads, slot)
        ClientStreams.__init__(self, self._open)
        self._admission = Admission(None)
        self._samples = SampleEngine(self._open, lambda: self._made.abort())
        Keepers.__init__(self, self._samples, self.usage)

    def make(self, maker: str, *args: Any) -> None:
        """Make the engine; see `EngineActor.make`. The arguments begin with a model folder and a RolloutConfig."""
        super().make(maker, *args)
        _, config, *_ = args
        self._admission = Admission(config.max_tokens_in_flight)

    def abort(self) -> None:
        """Abort all that is being generated, its stream, and the keepers that would generate next."""
        self.stop_keepers()
        self._samples.abort()
        self._made.abort()

    def join(self, samples: Sequence[SampleRequest]) -> bool:
        """Add samples to the running `generate_samples`; see `cairn.engines.agents.episodes.samples.SampleEngine`."""
        return self._samples.join(samples)

    def acknowledge(self, number: int) -> None:
        """Confirm that what was streamed with this number, and all before it, is durable."""
        self._samples.acknowledge(number)

    def end_update(self) -> int | None:
        """End an update of the weights, and return the version that is served then."""
        self._made.end_weight_update()
        version: int | None = self._made.get_weight_version()
        return version

    def usage(self) -> dict[str, int]:
        """Return usage counters; see `cairn.engines.rollout.base` and `cairn.engines.rollout.admission`."""
        return {**self._made.usage(), **self._admission.usage()}

    def generate_samples(
        self, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction
    ) -> Iterator[list[GeneratedSample] | Recorded]:
        """Generate samples; see `cairn.engines.agents.episodes.samples`."""
        yield from self._samples.generate(samples, params, function)

    def _open(self) -> Stream:
        return self._admission.open(self._made.open())


class EpisodesActor(EngineActor):
    """A worker in which episodes run. Lists of processes show the name of this class."""


class RouterActor(EngineActor):
    """A router in front of rollout engines. Lists of processes show the name of this class."""


class RewardModelActor(EngineActor):
    """The reward model. Lists of processes show the name of this class."""


class TrainingActor(EngineActor):
    """A rank of the training engine. Lists of processes show the name of this class."""
