"""SGLang behind the interface of a rollout engine."""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.models.configs import context_length
from cairn.engines.models.folders import check_model_folder, parameter_names
from cairn.engines.rollout.admission import Occupancy
from cairn.engines.rollout.plan import Place
from cairn.engines.rollout.requests import validate_requests
from cairn.engines.rollout.sglang.completions import Routes
from cairn.engines.rollout.sglang.generation import Generation, Loads, Route
from cairn.engines.rollout.sglang.launch import FurtherRank, launch
from cairn.engines.rollout.sglang.launch_plan import ServerPlan
from cairn.engines.rollout.sglang.server import LOADS, Control, Watch
from cairn.engines.rollout.sglang.weights import ServerWeights
from cairn.engines.types.errors import EngineDied, RequestRefused
from cairn.engines.types.types import Completion, GenerateRequest, Stream
from cairn.engines.weights.fp8 import Fp8Weights
from cairn.storage.records import Environment

COMPILATION = 300.0
"""Seconds from its start in which a server on GPUs may compile kernels for its first batches, and be silent."""


class ServerStream:
    """A `Stream` of requests to SGLang's servers.

    Args:
        check: raises where requests cannot be served.
    """

    def __init__(
        self, generation: Generation, check: Callable[[Sequence[GenerateRequest]], None] = lambda requests: None
    ) -> None:
        self._generation = generation
        self._check = check
        self._lock = threading.Lock()
        self._submitted = self._taken = 0
        """Numbers of requests submitted, and of requests whose result was taken."""
        self._ended: queue.SimpleQueue[Future[Completion]] = queue.SimpleQueue()

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._check(requests)
        with self._lock:
            for future in self._generation.submit(requests):
                self._submitted += 1
                future.add_done_callback(self._ended.put)

    def __iter__(self) -> "ServerStream":
        return self

    def __next__(self) -> list[Completion]:
        if self._taken >= self._submitted:
            raise StopIteration
        future = self._ended.get()
        self._taken += 1
        error = future.exception()
        if error is None:
            return [future.result()]
        if not isinstance(error, RequestRefused):
            self.close()
        raise error

    def abort(self) -> None:
        self._generation.abort()

    def close(self) -> None:
        self._generation.close()
        with self._lock:
            self._taken = self._submitted

    def __del__(self) -> None:
        self._generation.close()


class SGLangEngine(ServerWeights):
    """A `RolloutEngine` that owns one SGLang server, or uses one that runs elsewhere.

    Args:
        model_path: folder in Hugging Face format.
        config: read for `dtype`, `num_threads`, `max_running_requests`, `timeout` and the health checks; for whether
            there is a `rollout_stop`, which needs a server with a tokenizer; and, if there is no plan, for `sglang`.
        device: "cpu" or "cuda".
        log: file that the server's output is appended to.
        start_timeout: seconds until the server must serve.
        plan: plan of the server; by default a single one with the options of `config`.
        place: place of its first process.
        call_timeout: seconds that the server may take to respond, except for loading a model folder.

    Raises:
        BadModel, SGLangMissing, EngineDied, EngineTimeout.
    """

    def __init__(
        self,
        model_path: str,
        config: RolloutConfig,
        device: str,
        log: Path,
        start_timeout: float = 600.0,
        plan: ServerPlan | None = None,
        place: Place | None = None,
        call_timeout: float = 60.0,
    ) -> None:
        model = check_model_folder(model_path)
        self._context, self._vocab = context_length(model), model.vocab_size
        self._model_path = model_path
        self._routes = Routes(model)
        self._timeout, self._concurrency = config.timeout, config.sglang_server_concurrency
        plan = plan or ServerPlan(options=config.sglang)
        launched = launch(model_path, config, device, plan, place or Place(), log, start_timeout)
        self.server = launched.server
        self.worker = launched.worker
        """The engine's server, as routers are configured with it."""
        self._route = Route.to(self.server.url)
        self._deterministic = launched.deterministic
        self._environment = launched.environment
        fp8 = Fp8Weights.of(model_path)
        names = parameter_names(model_path) | (fp8.scales if fp8 else frozenset())
        control = Control(self.server.url, call_timeout)
        own, received = plan.external_url is None, "float32" if fp8 else config.dtype
        super().__init__(
            control,
            names,
            config.timeout,
            checked=received if own else None,
            has_weights=own and config.model_path is None,
        )
        self._occupancy = Occupancy()
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[Generation] = weakref.WeakSet()
        self._paused = False
        """Whether samples are paused until the update of the weights has ended."""
        self._loads = Loads(self.server.url)
        self._hung: str | None = None
        self._watch = Watch(
            self.server.url,
            config.rollout_health_check_interval,
            config.rollout_health_check_timeout,
            self._end_hung_server,
            first_wait=config.rollout_health_check_first_wait or (0 if device == "cpu" else COMPILATION),
        )

    def open(self) -> Stream:
        if not self._occupancy.generating:
            self._loads = Loads(self.server.url)
        generation = Generation(
            self._route,
            self._context,
            self._timeout,
            self._concurrency,
            self._loads,
            self._occupancy,
            self._explained,
            self._routes,
        )
        with self._lock:
            self._streams.add(generation)
            if self._paused:
                generation.pause()
        return ServerStream(generation, self._check)

    def generate(self, requests: Sequence[GenerateRequest]) -> Stream:
        stream = self.open()
        stream.submit(requests)
        return stream

    def follow(self, router: str | None, servers: Sequence[str] = ()) -> None:
        """Send the requests of later calls of `generate` through a router, which may pass them to any of these servers;
        None: to the engine's own server."""
        self._route = Route.to(self.server.url) if router is None else Route(router, tuple(servers))

    def abort(self) -> None:
        for generation in self._open_streams():
            generation.abort()

    def begin_weight_update(self, version: int, in_flight: bool = False) -> None:
        with nullcontext() if in_flight else self._occupancy.alone("update weights"):
            self._watch.pause()
            if in_flight:
                with self._lock:
                    self._paused = True
                for generation in self._open_streams():
                    generation.pause()
            super().begin_weight_update(version, in_flight)

    def retracted(self) -> list[Completion]:
        return [part for generation in self._open_streams() for part in generation.retracted()]

    def end_weight_update(self) -> None:
        super().end_weight_update()
        self._watch.resume()
        with self._lock:
            self._paused = False
        for generation in self._open_streams():
            generation.resume()

    def release_memory(self) -> None:
        with self._occupancy.alone("release its memory"):
            super().release_memory()

    def check_batch_invariance(self) -> bool:
        """Return whether SGLang's deterministic inference is on. Only that makes a sample independent of its batch."""
        return self._deterministic

    def batch_invariant(self) -> bool:
        return self._deterministic

    def environment(self) -> Environment:
        return self._environment

    def usage(self) -> dict[str, int]:
        return {"running_requests_max": self._loads.running, "queued_requests_max": self._loads.queued}

    def health(self) -> dict[str, Any]:
        """Return the server's state. Keys: model, worker, url, log, server_pid, weight_version, released
        (memory), and loads: what the server runs and queues.

        Raises EngineDied where the server is gone or was found to hang.
        """
        if self._hung is not None or not self.server.alive():
            raise EngineDied(f"{self._hung or 'the SGLang server is gone'}; {self.server.last_words()}")
        loads = self._control.call(LOADS)
        return {
            "model": self._model_path,
            "worker": asdict(self.worker),
            "url": self.server.url,
            "log": str(self.server.log),
            "server_pid": self.server.pid,
            "weight_version": self.get_weight_version(),
            "released": self.released(),
            "loads": loads,
        }

    def close(self) -> None:
        """End the server, unless it runs elsewhere."""
        self._watch.end()
        self._control.close()
        self.server.stop()

    def _end_hung_server(self, seen: str) -> None:
        self._hung = f"{seen} and was given up"
        self.server.stop()

    def _open_streams(self) -> list[Generation]:
        with self._lock:
            return list(self._streams)

    def _check(self, requests: Sequence[GenerateRequest]) -> None:
        validate_requests(requests, self._context, self._vocab)
        self.require_ready()

    def _explained(self, error: EngineDied) -> EngineDied:
        return EngineDied(f"{self._hung or error}; {self.server.last_words()}")


def make(
    model_path: str,
    config: RolloutConfig,
    plan: ServerPlan,
    place: Place,
    log: Path,
    start_timeout: float,
    call_timeout: float,
) -> SGLangEngine | FurtherRank:
    """Make an engine for a fleet, or a further machine's part of it."""
    if place.node_rank:
        return FurtherRank(launch(model_path, config, plan.device, plan, place, log, start_timeout))
    return SGLangEngine(model_path, config, plan.device, log, start_timeout, plan, place, call_timeout)
