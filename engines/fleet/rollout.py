"""The driver's handles on a rollout engine and on the router."""

import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import ray

from cairn.configs.schema.operations import FleetConfig
from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.fleet.actors import EngineActor, RolloutActor
from cairn.engines.fleet.calls import Deadline, wait
from cairn.engines.fleet.episodes import Episodes, EpisodeWorkerHandle
from cairn.engines.fleet.fencing import Method, P, R
from cairn.engines.fleet.handles import CONTROL, UPDATING, Actor, Call, EngineHandle, ModelHandle, log_of
from cairn.engines.fleet.keepers import Gathered, Make, Messages
from cairn.engines.rollout.base import RolloutEngine, Routed, Router
from cairn.engines.rollout.plan import EnginePlan, Place, kind_of
from cairn.engines.types.errors import EngineError, EngineTimeout
from cairn.engines.types.keeping import Finished
from cairn.engines.types.trajectories import GeneratedSample, Recorded, SampleRequest
from cairn.engines.types.types import Completion, GenerateRequest, SamplingParams
from cairn.engines.weights.layout import MemoryTag

REPORT_TIMEOUT = 15.0
"""Seconds beyond its own deadline that an actor gets to end a server that did not start, and to report its log."""


KEEPING = "keeping"
"""Concurrency group of the call that ends keepers while they keep the engine busy."""


class RouterHandle(EngineHandle):
    """The router in front of the rollout servers, as the driver sees it. `cairn.engines.rollout.sglang.router`
    describes its calls; all may raise EngineDied and EngineTimeout."""

    def __init__(
        self, name: str, actor: Actor, options: Mapping[str, Any], config: RolloutConfig, fleet: FleetConfig
    ) -> None:
        super().__init__(name, [actor], fleet)
        self._options = dict(options)
        self._config = config
        self._workers: list[Mapping[str, Any]] | None = None
        """Servers that the router sends requests to; None where that is unknown."""
        self.changing = threading.Lock()
        """Lock held while it is chosen which servers these are: a server that was removed would be waited for."""

    @property
    def url(self) -> str:
        """Address for requests. A restart changes it."""
        return self.health()["url"]

    def serve(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Send requests to exactly these servers. Asks nothing of a router that does so already."""
        if self._workers != workers:
            self._workers = None
            self.call(None, Router.serve, workers).result()
            self._workers = list(workers)

    def remove(self, url: str) -> None:
        """Send no more requests to a server. A router that does not obey is killed: its requests must not reach that
        server."""
        self._workers = None
        try:
            self.call(None, Router.remove, url).result()
        except EngineError:
            self.kill()

    def _make_engine(self, deadline: Deadline) -> None:
        self._workers = None
        host = self._host(self.actor, deadline)
        maker = kind_of(self._config.engine).router
        assert maker is not None
        arguments = (self._options, self._config, host, log_of(self.actor), deadline.remaining)
        making = self.call(None, EngineActor.make, maker, *arguments)
        making.result(Deadline(deadline.remaining + REPORT_TIMEOUT))


ENGINE = "cairn.engines.rollout.plan:make_engine"
"""Function that makes the engine in its actor."""


class RolloutHandle(ModelHandle):
    """A rollout engine as the driver sees it. `cairn.engines.rollout.base` describes its calls; all may raise
    EngineDied and EngineTimeout."""

    def __init__(
        self,
        name: str,
        actors: Sequence[Actor],
        plan: EnginePlan,
        model: tuple[str, str],
        config: RolloutConfig,
        fleet: FleetConfig,
        router: RouterHandle | None = None,
        model_digests: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            actors: one on each machine of the engine. Calls for the engine go to the first.
            model: see `cairn.engines.rollout.plan.served_model`.
        """
        self._model_path, name_of_digest = model
        super().__init__(name, actors, fleet, {name_of_digest: self._model_path}, model_digests or {})
        self.ranks = range(0)
        """Training ranks with which the engine shares GPUs."""
        self._plan = plan
        self._config = config
        self._router = router
        self._kind = kind_of(config.engine)
        self._batch_invariant: bool | None = None
        self.worker: Mapping[str, Any] | None = None
        """The engine's server as routers are configured with it: its `url` and more. None while the engine is being
        replaced."""
        self._route: tuple[str, Sequence[str]] | None = None
        self._keepers = Gathered(self._keep)
        self._busy = threading.Lock()
        self._deadline = Deadline(0)
        """Deadline of the running generation."""
        self.episodes: Episodes | None = None
        """The workers in which user code runs; None if there are none."""
        self.serving = threading.Lock()
        """Lock held while the engine is checked and updated to other weights."""
        self.last_check: tuple[float, int | None] = (0.0, None)
        """Time at which the last successful check of the engine began, or of a later message of a keeper; and the
        weight version that it serves since."""
        self.routed: int | None = None
        """Weight version for which the router sends the engine requests; None where it sends none."""

    def take_workers(self, workers: Sequence[EpisodeWorkerHandle]) -> None:
        """Run user code in these workers from now on."""
        self.episodes = Episodes(self.actor, workers, self._fleet)

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        """Stream completions as they finish; see `generate_samples`."""
        return self._stream(RolloutEngine.generate, list(requests))

    def keep(self, make: Make) -> Generator[Any, None, None]:
        """Make a keeper of samples in the engine's process, which has the engine generate them. Yield its messages,
        Finished last. Each keeper has `rollout.timeout` seconds from its first message. Keepers that wait for the
        engine share a call; see cairn.engines.fleet.keepers.

        Raises what `make` and the keeper raise, EngineDied and EngineTimeout.
        """
        with self._doubted_on_failure():
            for message in self._keepers.keep(make):
                yield replace(message, usage=self._counted(message.usage)) if isinstance(message, Finished) else message

    def _keep(self, makes: Sequence[Make]) -> Iterator[Messages]:
        begun = set[int]()
        for messages in self._stream(RolloutActor.keep, makes):
            self.last_check = (time.monotonic(), self.last_check[1])  # its weights stay until this call ends
            if not begun.issuperset(place for place, _ in messages):
                begun.update(place for place, _ in messages)
                self._deadline.restart()
            yield messages

    def generate_samples(
        self, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction
    ) -> Iterator[list[GeneratedSample] | Recorded]:
        """Stream samples as they end, and their records before that. The deadline is `rollout.timeout` seconds in all,
        or, where the run streams, after the last sign of work (`extend_deadline`). If the engine is silent, check
        whether it still lives. Closing the iterator ends the generation.

        Raises what the engine raises.
        """
        if self.episodes is None or not function.records:
            return self._stream(RolloutActor.generate_samples, list(samples), params, function)
        return self._in_workers(self.episodes, list(samples), params, function)

    def _in_workers(
        self, episodes: Episodes, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction
    ) -> Iterator[list[GeneratedSample] | Recorded]:
        with self.alone():
            self._deadline = deadline = Deadline(self._config.timeout)
            for part in episodes.generate_samples(samples, params, function, deadline, self.usage):
                if part:
                    self.extend_deadline()
                yield part

    def _stream(self, method: Method[P, Iterator[R]], *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        with self.alone():
            self._deadline = deadline = Deadline(self._config.timeout)
            stream = self.actor.callee(num_returns="streaming").call(method, *args, **kwargs)
            try:
                while self._wait_for_next(stream, deadline):
                    try:
                        ref = next(stream)
                    except StopIteration:
                        return
                    part: R = Call[R](self, self.actor, method.__name__, ref).result(deadline)
                    self.extend_deadline()
                    yield part
            except GeneratorExit:
                self._abort(stream)
                raise

    def extend_deadline(self) -> None:
        """Restart `rollout.timeout` of a streaming run's generation, which lasts as long as there are prompts.

        Called at each sign of work: the engine has ended a sample, or has accepted other samples or new weights.
        """
        if self._config.pipeline == "streaming":
            self._deadline.restart()

    def join(self, samples: Sequence[SampleRequest]) -> bool:
        """Have the running `generate_samples` generate these samples too. Returns whether it does. May be called from
        any thread."""
        joined = self.ask(RolloutActor.join, list(samples))
        if joined:
            self.extend_deadline()
        return joined

    def retracted(self) -> list[Completion]:
        """Return what retracted samples had; see `cairn.engines.rollout.base`."""
        return self.call(UPDATING, RolloutEngine.retracted).result()

    def acknowledge(self, number: int) -> None:
        """Confirm that what the running `generate_samples` yielded with this number, and all before it, is durable. May
        be called from any thread."""
        if self.episodes is not None:  # calls of built-in functions are not recorded
            self.episodes.acknowledge(number)
            return
        self.ask(RolloutActor.acknowledge, number)

    def abort(self) -> None:
        """End the running `generate`. The caller must read its stream to the end; the stream yields every unfinished
        sample with what it has so far. Returns when the engine has received the abort, so that it affects no later
        `generate`."""
        if self.episodes is not None:
            self.episodes.abort()
        self.ask(RolloutActor.abort)

    @property
    def batch_invariant(self) -> bool:
        """Whether a sample is independent of what else is in its batch, as tested when the engine started. Queried
        once."""
        known = self._batch_invariant
        if known is None:
            with self._replacing:
                known = self._batch_invariant = self.ask(RolloutEngine.batch_invariant)
        return known

    def start(self, deadline: Deadline, *, adopt: bool = False) -> None:
        with self._replacing:
            self._batch_invariant, self.last_check = None, (0.0, None)
            super().start(deadline, adopt=adopt)

    def usage(self) -> dict[str, int]:
        """Return how busy the engine was in the last `generate`, see cairn.engines.rollout.base, and its `restarts`
        under this driver."""
        return self._counted(self.ask(RolloutActor.usage))

    def _counted(self, usage: Mapping[str, int]) -> dict[str, int]:
        workers = {} if self.episodes is None else {"episode_worker_restarts": self.episodes.restarts}
        return {**usage, "restarts": self.restarts, **workers}

    def follow(self, route: tuple[str, Sequence[str]] | None) -> None:
        """Send requests to this router, in front of these servers, from the next `generate` on; None: to the engine's
        own server."""
        if route != self._route:
            self.ask(Routed.follow, *(route or (None, ())))
            self._route = route

    def leave_router(self) -> None:
        """Neither send requests to the router nor get any from it, until the engine is routed again."""
        if self._unroute():
            self.follow(None)

    def health(self) -> dict[str, Any]:
        health = super().health()
        self.worker = health.get("worker")
        return health

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the engine exclusively: to generate, or to update its weights."""
        if not self._busy.acquire(timeout=self._config.timeout):
            raise EngineTimeout(f"{self.actor.name} was busy for {self._config.timeout:g} s")
        try:
            with self._doubted_on_failure():
                yield
        finally:
            self._busy.release()

    @contextmanager
    def _doubted_on_failure(self) -> Iterator[None]:
        """Forget the last check of the engine where the body raises EngineError."""
        try:
            yield
        except EngineError:
            self.last_check = (0.0, None)
            raise

    def idle(self, held: ExitStack) -> bool:
        """Return whether the engine is idle; hold it exclusively then, as `alone` does, until `held` is closed."""
        if not self._busy.acquire(blocking=False):
            return False
        held.callback(self._busy.release)
        return True

    @property
    def maps_gpu_memory(self) -> bool:
        """Whether the engine maps weights from the memory of GPUs that it shares with training."""
        return bool(self.ranks) and self._kind.maps_gpu_memory

    @property
    def reports_checksum(self) -> bool:
        """Whether the engine reports a checksum of the weights of an update."""
        return self._kind.reports_checksum(self._config)

    @property
    def reports_loaded(self) -> bool:
        """Whether the engine reports a checksum of what it made of the weights."""
        return self._kind.reports_loaded

    def has_layout_of(self, other: "RolloutHandle") -> bool:
        """Return whether both engines cut and merge weights in the same way."""
        return self._plan == other._plan

    def release_memory(self) -> None:
        """Release the engine's memory; see cairn.engines.rollout.base."""
        with self.alone():
            self.routed, self.last_check = None, (0.0, None)  # its weights are lost
            self.call(UPDATING, RolloutEngine.release_memory).result()

    def resume_memory(self, tag: MemoryTag) -> None:
        """Take back a part of the memory."""
        self.call(UPDATING, RolloutEngine.resume_memory, tag).result()

    def _adopted(self) -> bool:
        if not super()._adopted():
            return False
        self.call(CONTROL, RolloutActor.abort)  # nothing reads the results of the last driver's requests
        self.call(CONTROL, RolloutActor.close_streams)
        try:  # what it took is durable then, and this driver finds it
            self.call(KEEPING, RolloutActor.close_keepers).result()
        except EngineError:  # it may still be busy with them
            return False
        if self._router is not None:
            self.call(CONTROL, Routed.follow, None)  # that driver's router may be gone
        return True

    def _unroute(self) -> bool:
        """Have the router, if there is one, send the engine's server no more requests. Returns whether it has one."""
        if self._router is None or self.worker is None:
            self.routed = None
            return False
        with self._router.changing:
            self.routed = None
            self._router.remove(self.worker["url"])
        return True

    def _make_engine(self, deadline: Deadline) -> None:
        self._unroute()  # another server may get its address
        self.worker = self._route = None
        hosts = [self._host(actor, deadline) for actor in self._actors]
        meeting_point = None
        if len(hosts) > 1:
            port = self.call(None, EngineActor.free_port, hosts[0]).result(deadline)
            meeting_point = f"{hosts[0]}:{port}"
        calls = [
            self.call_one(
                actor,
                EngineActor.make,
                ENGINE,
                self._model_path,
                self._config,
                self._plan,
                Place(host, rank, meeting_point),
                log_of(actor),
                deadline.remaining,
                self._fleet.call_timeout,
            )
            for rank, (actor, host) in enumerate(zip(self._actors, hosts, strict=True))
        ]
        patience = Deadline(deadline.remaining + REPORT_TIMEOUT)
        for call in calls:
            call.result(patience)
        self.health()

    def _wait_for_next(self, stream: "ray.ObjectRefGenerator", deadline: Deadline) -> Literal[True]:
        """Wait until the stream has something to read or has ended."""
        while deadline.remaining:
            ready, _ = wait([stream], min(deadline.remaining, self._fleet.call_timeout))
            if ready:
                return True
            self.usage()  # of the actor alone: other servers behind the router do the work of a dead one
        self.suspect = True
        raise EngineTimeout(f"{self.actor.name}.generate() did not end within {deadline.seconds:g} s")

    def _abort(self, stream: "ray.ObjectRefGenerator") -> None:
        """End a generation whose reader is gone, so that the engine is free for the next."""
        abort = self.call(CONTROL, RolloutActor.abort)
        ended, _ = ray.wait([abort.ref, stream.completed()], num_returns=2, timeout=self._fleet.call_timeout)
        self.suspect = self.suspect or len(ended) < 2
