"""The workers in which the episodes of a rollout engine run, as the driver sees them.

| event | consequence |
|---|---|
| samples are requested | they are distributed over the engine's workers; each result is passed on as it comes |
| a worker dies, or does not respond | it is replaced, and its unfinished samples resume there from their records |
| a worker dies `MAX_DEATHS` times in a call | EngineDied, for the whole call |
| a worker raises an error, for example because the engine died | the call raises it, and the other workers end theirs |
| the call is cancelled | the processes of user code end |
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_any
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError, RayTaskError

from cairn.configs.schema.operations import FleetConfig
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.fleet.actors import EngineActor, RolloutActor
from cairn.engines.fleet.calls import Deadline, wait
from cairn.engines.fleet.episode_worker import EpisodeWorker
from cairn.engines.fleet.handles import CONTROL, Actor, Call, EngineHandle
from cairn.engines.fleet.remote_stream import SUBMITTING, RemoteEngine
from cairn.engines.types.errors import EngineDied, EngineError, EngineTimeout, Superseded
from cairn.engines.types.trajectories import GeneratedSample, Recorded, SampleKey, SampleRequest, add_records
from cairn.engines.types.types import SamplingParams

WORKER = "cairn.engines.fleet.episode_worker:EpisodeWorker"
"""Class that an episode actor makes as its engine."""

MAX_DEATHS = 4
"""Deaths of one worker in a call after which the call fails."""

CHECK_INTERVAL = 1.0
"""Most seconds between two checks of the workers."""


class EpisodeWorkerHandle(EngineHandle):
    """An episode worker. Calls may raise EngineDied and EngineTimeout."""

    def begin(
        self, engine: RemoteEngine, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction
    ) -> "ray.ObjectRefGenerator":
        """Start episodes; `take` reads what they yield."""
        callee = self.actor.callee(num_returns="streaming")
        return callee.call(EpisodeWorker.generate_samples, engine, list(samples), params, function)

    def take(self, ref: Any, deadline: Deadline) -> list[GeneratedSample] | Recorded:
        """Return what was yielded. Raises what the worker raises."""
        return Call[list[GeneratedSample] | Recorded](self, self.actor, "generate_samples", ref).result(deadline)

    def _make_engine(self, deadline: Deadline) -> None:
        self.call(None, EngineActor.make, WORKER).result(deadline)

    def _adopted(self) -> bool:
        if not super()._adopted():
            return False
        self.call(CONTROL, EpisodeWorker.give_up_all)  # nothing reads the results of the last driver's requests
        return True


@dataclass
class _Call:
    """The running call of a worker."""

    worker: EpisodeWorkerHandle
    engine: RemoteEngine
    left: dict[SampleKey, SampleRequest]
    """Samples that have not ended."""
    stream: "ray.ObjectRefGenerator"
    last_seen: float
    """Time at which the worker last yielded something or was seen alive."""
    health: Call[dict[str, Any]] | None = None
    """Health check under way, made because the worker was silent."""
    checked_at: float = 0.0


class Episodes:
    """The episode workers of one engine, for one call of `generate_samples` at a time."""

    def __init__(self, engine: Actor, workers: Sequence[EpisodeWorkerHandle], fleet: FleetConfig) -> None:
        self.workers = workers
        self._engine = engine
        self._fleet = fleet
        self._calls: dict[Any, _Call] = {}
        """Running calls, by stream."""
        self._lost: dict[Future[None], _Call] = {}
        """Calls whose workers are being replaced."""
        self._numbers = count()
        self._pending_acks: deque[tuple[int, _Call, int]] = deque()
        """Numbers of records that workers wait for to be durable: the number here, the call, and the worker's own
        number."""
        self._losses: Counter[str] = Counter()
        self._aborted = False
        self._pool = ThreadPoolExecutor(len(workers), "episode-workers")

    @property
    def restarts(self) -> int:
        """Number of times that this driver restarted the workers."""
        return sum(worker.restarts for worker in self.workers)

    def generate_samples(
        self,
        samples: Sequence[SampleRequest],
        params: SamplingParams,
        function: GenerateFunction,
        deadline: Deadline,
        check: Callable[[], Any],
    ) -> Iterator[list[GeneratedSample] | Recorded]:
        """Stream samples as they end, and their records before that. After every `CHECK_INTERVAL` seconds of silence,
        yield an empty list. If the silence lasts, call `check`, which raises where the engine is dead."""
        self._aborted = False
        self._losses.clear()
        self._pending_acks.clear()
        silent_since = time.monotonic()
        try:
            for index, worker in enumerate(self.workers):
                self._begin(worker, samples[index :: len(self.workers)], params, function)
            while self._calls or self._lost:
                if not deadline.remaining:
                    raise EngineTimeout(f"{self._engine.name}: its episodes did not end within {deadline.seconds:g} s")
                ready = self._ready(deadline)
                for stream in ready:
                    silent_since = time.monotonic()
                    yield from self._taken(stream, deadline)
                if not ready:
                    yield []  # so that the reader checks whether it can still make awaited records durable
                for call in self._replaced():
                    if self._aborted:
                        yield [GeneratedSample.aborted(sample) for sample in call.left.values()]
                    else:
                        self._begin(call.worker, list(call.left.values()), params, function)
                self._check_silent()
                if time.monotonic() - silent_since > self._fleet.call_timeout:
                    check()
                    silent_since = time.monotonic()
        finally:
            self._end()

    def acknowledge(self, number: int) -> None:
        """Confirm that what was yielded with this number, and all before it, is durable. May be called from any thread;
        does not block."""
        known: dict[str, tuple[_Call, int]] = {}
        while self._pending_acks and self._pending_acks[0][0] <= number:
            _, call, worker_number = self._pending_acks.popleft()
            known[call.engine.client] = (call, worker_number)
        for client, (call, worker_number) in known.items():
            with suppress(EngineDied):  # then no sample waits
                call.worker.call(CONTROL, EpisodeWorker.acknowledge, client, worker_number)

    def abort(self) -> None:
        """Have all samples returned soon, with what they have so far. May be called from any thread."""
        self._aborted = True
        refs = []
        for call in list(self._calls.values()):
            with suppress(EngineDied):  # its samples are not restarted
                refs.append(call.worker.call(CONTROL, EpisodeWorker.abort, call.engine.client).ref)
        wait(refs, self._fleet.call_timeout, len(refs)) if refs else None

    def _begin(
        self,
        worker: EpisodeWorkerHandle,
        samples: Sequence[SampleRequest],
        params: SamplingParams,
        function: GenerateFunction,
    ) -> None:
        if not samples:
            return
        client = f"{worker.name}/{uuid4().hex[:12]}"
        engine = RemoteEngine(self._engine.callee(), self._engine.name, client, self._fleet.call_timeout)
        call = _Call(worker, engine, {sample.key: sample for sample in samples}, None, time.monotonic())
        try:
            call.stream = worker.begin(engine, samples, params, function)
        except EngineDied:
            self._lose(call)
        else:
            self._calls[call.stream] = call

    def _ready(self, deadline: Deadline) -> list[Any]:
        """Return the streams that have something to read or have ended, after some time at the latest."""
        patience = min(CHECK_INTERVAL, deadline.remaining)
        if self._calls:
            ready, _ = wait(list(self._calls), min(patience, 0.1) if self._lost else patience)
            return ready
        wait_for_any(list(self._lost), patience)
        return []

    def _taken(self, stream: Any, deadline: Deadline) -> Iterator[list[GeneratedSample] | Recorded]:
        call = self._calls[stream]
        call.last_seen = time.monotonic()
        try:
            result = call.worker.take(next(stream), deadline)
        except StopIteration:
            del self._calls[stream]
            return
        except EngineError as error:
            if not _is_worker_death(error):
                raise
            del self._calls[stream]
            self._lose(call)
            return
        if isinstance(result, Recorded):
            yield self._recorded(call, result)
            return
        for sample in result:
            call.left.pop(sample.key, None)
        yield result

    def _recorded(self, call: _Call, recorded: Recorded) -> Recorded:
        """Add the records to their samples, and return them under a number that no other worker has."""
        add_records(call.left, recorded.records)
        number = next(self._numbers)
        if recorded.awaited:
            self._pending_acks.append((number, call, recorded.number))
        return replace(recorded, number=number)

    def _lose(self, call: _Call) -> None:
        """Replace a worker that is dead or out of reach, while the others are read."""
        self._losses[call.worker.name] += 1
        if self._losses[call.worker.name] >= MAX_DEATHS:
            groups = ", ".join(map(str, sorted({key[0] for key in call.left})))
            raise EngineDied(f"{call.worker.name} died {MAX_DEATHS} times while it ran episodes of groups {groups}")

        def replace_worker() -> None:
            call.engine.call(SUBMITTING, RolloutActor.close_stream)
            call.worker.ensure_alive()

        call.worker.suspect = True
        self._lost[self._pool.submit(replace_worker)] = call

    def _replaced(self) -> list[_Call]:
        done = [future for future in self._lost if future.done()]
        calls = [self._lost.pop(future) for future in done]
        for future in done:
            future.result()
        return calls

    def _check_silent(self) -> None:
        """Check whether a worker with long episodes lives, while the others are read."""
        now = time.monotonic()
        for stream, call in list(self._calls.items()):
            if now - call.last_seen < self._fleet.call_timeout:
                continue
            try:
                if call.health is None:
                    call.health, call.checked_at = call.worker.call(CONTROL, EngineActor.health), now
                elif ray.wait([call.health.ref], timeout=0)[0]:
                    call.health.result(Deadline(CHECK_INTERVAL))
                    call.last_seen, call.health = now, None
                elif now - call.checked_at > self._fleet.call_timeout:
                    raise EngineTimeout(f"{call.worker.name} does not answer")
            except EngineError:
                del self._calls[stream]
                self._lose(call)

    def _end(self) -> None:
        """Cancel what is still running, if anything is."""
        calls, self._calls = list(self._calls.values()), {}
        calls_of_lost, self._lost = list(self._lost.values()), {}
        deadline = Deadline(self._fleet.call_timeout)
        running = calls
        while running and deadline.remaining:
            for call in running:
                with suppress(EngineError):
                    call.worker.call(CONTROL, EpisodeWorker.give_up, call.engine.client)
            ended, _ = ray.wait(
                [call.stream.completed() for call in running], num_returns=len(running), timeout=CHECK_INTERVAL
            )
            running = [call for call in running if call.stream.completed() not in ended]
        for call in running:
            call.worker.suspect = True
        with suppress(EngineError, Superseded):
            for call in [*running, *calls_of_lost]:
                call.engine.call(SUBMITTING, RolloutActor.close_stream)


def _is_worker_death(error: EngineError) -> bool:
    """Return whether an error of a call is the worker's own death, or the loss of something that it returned, rather
    than an error that the worker raised."""
    return isinstance(error.__cause__, RayError) and not isinstance(error.__cause__, RayTaskError)
