"""A rollout engine as the driver sees it."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import ray

from cairn.configs.schema.operations import FleetConfig
from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.fleet.calls import Deadline, wait
from cairn.engines.fleet.episodes import Episodes, EpisodeWorkerHandle
from cairn.engines.fleet.handles import CONTROL, UPDATING, Actor, EngineHandle, ModelHandle, log_of
from cairn.engines.rollout.plan import EnginePlan, Place, kind_of
from cairn.engines.scoring.reward_model import Answered, Score
from cairn.engines.types.errors import EngineError, EngineTimeout
from cairn.engines.types.trajectories import GeneratedSample, Recorded, SampleRequest
from cairn.engines.types.types import Completion, GenerateRequest, SamplingParams
from cairn.engines.weights.layout import MemoryTag

# The reward model as the driver sees it.


REWARD_MODEL = "cairn.engines.scoring.reward_model:RewardModel"


class RewardModelHandle(ModelHandle):
    """See cairn.engines.scoring.reward_model for what its calls do; all may raise EngineDied and EngineTimeout."""

    def __init__(self, name: str, actor: Actor, config: RunConfig, digests: Mapping[str, str]) -> None:
        assert config.reward.reward_model is not None
        self._options = config.reward.reward_model
        super().__init__(name, [actor], config.fleet, {"reward_model": self._options.path}, digests)
        self._actor = actor
        self._each = config.reward.rm_timeout
        self._turn = threading.Lock()

    def score(self, answered: Sequence[Answered]) -> list[Score]:
        """Scores, in order, by an engine that is made again where it is dead; within `fleet.call_timeout` seconds, or
        `reward.rm_timeout` for each if that is more. Threads take turns, and wait for theirs beside their deadlines."""
        with self._turn:
            self.ensure_alive()
            deadline = Deadline(max(self._fleet.call_timeout, self._each * len(answered)))
            found: list[Score] = self._result(self._actor.call("score", answered), deadline, self._actor, "score")
            return found

    def _make_engine(self, deadline: Deadline) -> None:
        self._result(self._actor.call("make", REWARD_MODEL, self._options), deadline, self._actor, "make")


# The router before the rollout servers, as the driver sees it.


TO_SAY_WHY = 15.0
"""Seconds beyond its own deadline that an actor gets to end a server that did not start, and to show its log."""


class RouterHandle(EngineHandle):
    """See cairn.engines.rollout.sglang.router for what the calls of one do; all may raise EngineDied and
    EngineTimeout."""

    def __init__(
        self, name: str, actor: Actor, options: Mapping[str, Any], config: RolloutConfig, fleet: FleetConfig
    ) -> None:
        super().__init__(name, [actor], fleet)
        self._actor = actor
        self._options = dict(options)
        self._config = config

    @property
    def url(self) -> str:
        """Where it takes requests; another one after a restart."""
        return self.health()["url"]

    def serve(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Send requests to exactly these servers."""
        self._call("serve", workers)

    def remove(self, url: str) -> None:
        """Send a server nothing more. A router that does not obey is ended: its requests must not reach that server."""
        try:
            self._call("remove", url)
        except EngineError:
            self.kill()

    def _call(self, method: str, *args: Any) -> None:
        self._result(self._actor.call(method, *args), Deadline(self._fleet.call_timeout), self._actor, method)

    def _make_engine(self, deadline: Deadline) -> None:
        host = self._host(self._actor, deadline)
        maker = kind_of(self._config.engine).router
        arguments = (maker, self._options, self._config, host, log_of(self._actor), deadline.remaining)
        ref = self._actor.call("make", *arguments)
        self._result(ref, Deadline(deadline.remaining + TO_SAY_WHY), self._actor, "make")


ENGINE = "cairn.engines.rollout.plan:make_engine"
"""What an actor makes."""


class RolloutHandle(ModelHandle):
    """A rollout engine. See cairn.engines.rollout.base for what its calls do; all may raise EngineDied and
    EngineTimeout."""

    def __init__(
        self,
        name: str,
        actors: Sequence[Actor],
        plan: EnginePlan,
        model_path: str,
        config: RolloutConfig,
        fleet: FleetConfig,
        router: RouterHandle | None = None,
        model_digests: Mapping[str, str] | None = None,
    ) -> None:
        """`actors`: one on each machine of the engine; the first speaks for it."""
        super().__init__(name, actors, fleet, {"model": model_path}, model_digests or {})
        self._actor = actors[0]
        self.ranks = range(0)
        """The training ranks with which it shares GPUs."""
        self._plan = plan
        self._model_path = model_path
        self._config = config
        self._router = router
        self._kind = kind_of(config.engine)
        self._batch_invariant: bool | None = None
        self._worker: Mapping[str, Any] | None = None
        self._route: tuple[str, Sequence[str]] | None = None
        self._busy = threading.Lock()
        self._deadline = Deadline(0)
        """Of what it generates."""
        self.episodes: Episodes | None = None
        """Where user code runs; None where there is none."""
        self.serving = threading.Lock()
        """Held while the engine is looked at, and brought to other weights."""
        self.looked: tuple[float, int | None] = (0.0, None)
        """When the last look at it began that ended well, and the weight version that it serves since."""
        self.routed: int | None = None
        """The weight version for which the router sends it requests; None where it does not."""

    def take_workers(self, workers: Sequence[EpisodeWorkerHandle]) -> None:
        """Have user code run in these from now on."""
        self.episodes = Episodes(self._actor, workers, self._fleet)

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        """Stream completions as they finish; see `generate_samples`."""
        return self._stream("generate", list(requests))

    def generate_samples(
        self, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction
    ) -> Iterator[list[GeneratedSample] | Recorded]:
        """Stream samples as they end, and what is recorded of them before, within `rollout.timeout` seconds in all, or,
        where the run streams, after the last sign of work (`heard`); an engine that is silent is asked whether it still
        lives. Giving the iterator up ends the generation.

        Raises what the engine raises.
        """
        if self.episodes is None or not function.records:
            return self._stream("generate_samples", list(samples), params, function)
        return self._in_workers(self.episodes, list(samples), params, function)

    def _in_workers(
        self, episodes: Episodes, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction
    ) -> Iterator[list[GeneratedSample] | Recorded]:
        with self.alone():
            self._deadline = deadline = Deadline(self._config.timeout)
            for told in episodes.generate_samples(samples, params, function, deadline, self.usage):
                if told:
                    self.heard()
                yield told

    def _stream(self, method: str, *args: Any) -> Iterator[Any]:
        with self.alone():
            self._deadline = deadline = Deadline(self._config.timeout)
            stream = self._actor.call(method, *args, num_returns="streaming")
            try:
                while self._more(stream, deadline):
                    try:
                        ref = next(stream)
                    except StopIteration:
                        return
                    told = self._result(ref, deadline, self._actor, method)
                    self.heard()
                    yield told
            except GeneratorExit:
                self._abort(stream)
                raise

    def heard(self) -> None:
        """It has shown that it works: it has ended a sample, or taken others or new weights. What it generates for a
        stream goes on for as long as there are prompts, so `rollout.timeout` begins anew there."""
        if self._config.pipeline == "streaming":
            self._deadline.begin_anew()

    def join(self, samples: Sequence[SampleRequest]) -> bool:
        """Have the running `generate_samples` generate these too; whether it does. From any thread."""
        ref = self._actor.call("join", list(samples), concurrency_group=CONTROL)
        joined: bool = self._result(ref, Deadline(self._fleet.call_timeout), self._actor, "join")
        if joined:
            self.heard()
        return joined

    def retracted(self) -> list[Completion]:
        """See `cairn.engines.rollout.base`."""
        found: list[Completion] = self.call("retracted")
        return found

    def acknowledge(self, number: int) -> None:
        """What the running `generate_samples` gave with this number is durable, and all before it. From any thread."""
        if self.episodes is not None:  # what our own functions are given is not recorded
            self.episodes.acknowledge(number)
            return
        ref = self._actor.call("acknowledge", number, concurrency_group=CONTROL)
        self._result(ref, Deadline(self._fleet.call_timeout), self._actor, "acknowledge")

    def abort(self) -> None:
        """End the running `generate`: its stream, which is to be read on, gives every unfinished sample as far as it
        came. Returns when the engine knows, so that no later `generate` is meant."""
        if self.episodes is not None:
            self.episodes.abort()
        ref = self._actor.call("abort", concurrency_group=CONTROL)
        self._result(ref, Deadline(self._fleet.call_timeout), self._actor, "abort")

    def weight_version(self) -> int | None:
        """The version it serves; None within an update."""
        ref = self._actor.call("get_weight_version", concurrency_group=CONTROL)
        return self._result(ref, Deadline(self._fleet.call_timeout), self._actor, "get_weight_version")

    @property
    def batch_invariant(self) -> bool:
        """Whether its samples do not depend on what else is in their batch, as tried when it started: asked once."""
        found = self._batch_invariant
        if found is None:
            with self._replacing:
                ref = self._actor.call("batch_invariant", concurrency_group=CONTROL)
                found = self._result(ref, Deadline(self._fleet.call_timeout), self._actor, "batch_invariant")
                self._batch_invariant = found
        return found

    def start(self, deadline: Deadline, *, adopt: bool = False) -> None:
        with self._replacing:
            self._batch_invariant = None
            super().start(deadline, adopt=adopt)

    def usage(self) -> dict[str, int]:
        """How busy it was in the last `generate`, see cairn.engines.rollout.base; and its `restarts` under this
        driver."""
        ref = self._actor.call("usage", concurrency_group=CONTROL)
        found = self._result(ref, Deadline(self._fleet.call_timeout), self._actor, "usage")
        workers = {} if self.episodes is None else {"episode_worker_restarts": self.episodes.restarts}
        return {**found, "restarts": self.restarts, **workers}

    @property
    def worker(self) -> Mapping[str, Any] | None:
        """Its server as a router is told of it, by its `url` and more; None while it is made again."""
        return self._worker

    def follow(self, route: tuple[str, Sequence[str]] | None) -> None:
        """Send requests to this router, behind which these servers are, from the next `generate` on; None: to its own
        server."""
        if route != self._route:
            ref = self._actor.call("follow", *(route or (None,)), concurrency_group=CONTROL)
            self._result(ref, Deadline(self._fleet.call_timeout), self._actor, "follow")
            self._route = route

    def leave_router(self) -> None:
        """Neither give requests to the router nor get any from it, until the engine is routed again."""
        self.routed = None
        if self._router is not None and self._worker is not None:
            self._router.remove(self._worker["url"])
            self.follow(None)

    def health(self) -> dict[str, Any]:
        found = super().health()
        self._worker = found.get("worker")
        return found

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the engine to oneself: to generate, or to update its weights."""
        if not self._busy.acquire(timeout=self._config.timeout):
            raise EngineTimeout(f"{self._actor.name} was busy for {self._config.timeout:g} s")
        try:
            yield
        finally:
            self._busy.release()

    @property
    def maps_gpu_memory(self) -> bool:
        """Whether it takes weights from the memory of GPUs that it shares with training."""
        return bool(self.ranks) and self._kind.maps_gpu_memory

    @property
    def tells_checksum(self) -> bool:
        """Whether it can say which weights it holds."""
        return self._kind.tells_checksum

    def release_memory(self) -> None:
        """Give its memory away; see cairn.engines.rollout.base."""
        with self.alone():
            self.call("release_memory")

    def resume_memory(self, tag: MemoryTag) -> None:
        """Take a part of it back."""
        self.call("resume_memory", tag)

    def call(self, method: str, *args: Any) -> Any:
        """Do a call that waits its turn behind those before it, within `fleet.call_timeout` seconds."""
        return self.finish(self.submit(method, *args), method)

    def submit(self, method: str, *args: Any) -> "ray.ObjectRef[Any]":
        """Begin a call that waits its turn behind those before it, and not for what is generated."""
        return self._actor.call(method, *args, concurrency_group=UPDATING)

    def finish(self, ref: "ray.ObjectRef[Any]", method: str, deadline: Deadline | None = None) -> Any:
        """Wait for a call that was begun, for `fleet.call_timeout` seconds by default."""
        return self._result(ref, deadline or Deadline(self._fleet.call_timeout), self._actor, method)

    def _adopted(self) -> bool:
        if not super()._adopted():
            return False
        self._actor.call("abort", concurrency_group=CONTROL)  # nobody listens to what its last driver asked for
        self._actor.call("close_streams", concurrency_group=CONTROL)
        if self._router is not None:
            self._actor.call("follow", None, concurrency_group=CONTROL)  # that driver's router may be gone
        return True

    def _make_engine(self, deadline: Deadline) -> None:
        if self._router is not None and self._worker is not None:
            self._router.remove(self._worker["url"])  # another server may come to have its address
        self._worker = self._route = self.routed = None
        hosts = [self._host(actor, deadline) for actor in self._actors]
        meeting_point = None
        if len(hosts) > 1:
            ref = self._actor.call("free_port", hosts[0])
            meeting_point = f"{hosts[0]}:{self._result(ref, deadline, self._actor, 'free_port')}"
        refs = [
            actor.call(
                "make",
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
        patience = Deadline(deadline.remaining + TO_SAY_WHY)
        for ref, actor in zip(refs, self._actors, strict=True):
            self._result(ref, patience, actor, "make")
        self.health()

    def _more(self, stream: "ray.ObjectRefGenerator", deadline: Deadline) -> Literal[True]:
        """Wait until the stream goes on or ends."""
        while deadline.remaining:
            ready, _ = wait([stream], min(deadline.remaining, self._fleet.call_timeout))
            if ready:
                return True
            self.usage()  # of the actor alone: without its server, the others behind the router go on for it
        self._suspect = True
        raise EngineTimeout(f"{self._actor.name}.generate() did not end within {deadline.seconds:g} s")

    def _abort(self, stream: "ray.ObjectRefGenerator") -> None:
        """End a generation that nobody listens to, so that the engine is free for the next."""
        told = self._actor.call("abort", concurrency_group=CONTROL)
        ended, _ = ray.wait([told, stream.completed()], num_returns=2, timeout=self._fleet.call_timeout)
        self._suspect = self._suspect or len(ended) < 2
