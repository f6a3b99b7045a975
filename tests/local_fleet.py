"""The real engines in this process, behind the surface that tasks know of a fleet: these tests are not about Ray."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from cairn.configs.engines import reader_of
from cairn.configs.schema.run import RunConfig
from cairn.configs.view import view
from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.engines.fleet.membership import Membership
from cairn.engines.fleet.turns import Turns
from cairn.engines.scoring.reward_model import RewardModel
from cairn.engines.training.factory import make_engine
from cairn.engines.types.errors import PublicationGone, RequestRefused, WrongVersion
from cairn.engines.types.keeping import Finished, Keeper, closed_in_the_end
from cairn.engines.types.trajectories import GeneratedSample, Recorded, SampleRequest
from cairn.engines.types.types import (
    Completion,
    GenerateRequest,
    Position,
    Publication,
    RequestId,
    Stream,
)
from cairn.engines.weights.versions import FILE_BYTES, VersionWriter
from cairn.storage.opening import open_store
from cairn.storage.records import Environment
from cairn.storage.store.store import StoredFile
from tests.spare_engines import engine_of, release

Generate = Callable[[Sequence[GenerateRequest]], Iterator[list[Completion]]]


class Counted:
    """A stream of an engine that counts groups."""

    def __init__(self, stream: Stream, engine: "LocalRollout") -> None:
        self._stream, self._engine = stream, engine

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._engine.generated_groups += len({request.request_id[0] for request in requests})
        self._stream.submit(requests)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> list[Completion]:
        return next(self._stream)

    def abort(self) -> None:
        self._stream.abort()

    def close(self) -> None:
        self._stream.close()


class Calls:
    """A `Stream` whose every `submit` is a call of a function, of which tests have their own."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._begun: deque[tuple[dict[RequestId, GenerateRequest], Iterator[list[Completion]]]] = deque()

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._begun.append(({one.request_id: one for one in requests}, self._generate(requests)))

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> list[Completion]:
        while self._begun:
            left, call = self._begun[0]
            try:
                completions = next(call)
            except StopIteration:
                self._begun.popleft()
                continue
            except RequestRefused as refused:
                self._begun.popleft()
                self.submit([one for id, one in left.items() if id not in refused.refused])
                raise
            for completion in completions:
                del left[completion.request_id]
            return completions
        raise StopIteration

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self._begun.clear()


def calls(generate: Generate) -> Callable[[], Stream]:
    """Return a function that opens streams of calls of `generate`."""
    return lambda: Calls(generate)


def dying_after(fleet: "LocalFleet", completions: int) -> "LocalFleet":
    """Interrupt the driver after so many completions of its rollout engine, one at a time."""
    engine, left = fleet.rollout[0], completions
    generate = engine.generate

    def dying(requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        nonlocal left
        for completion in chain.from_iterable(generate(requests)):
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            yield [completion]

    engine.open = calls(dying)  # type: ignore[method-assign]
    return fleet


def dying_after_samples(fleet: "LocalFleet", count: int) -> "LocalFleet":
    """Interrupt the driver after so many samples have ended, in any order."""
    engine, left = fleet.rollout[0], count
    generate = engine.generate_samples

    def dying(*args: Any) -> Iterator[list[GeneratedSample] | Recorded]:
        nonlocal left
        for message in generate(*args):
            yield message
            left -= 0 if isinstance(message, Recorded) else len(message)
            if left <= 0:
                raise KeyboardInterrupt

    engine.generate_samples = dying  # type: ignore[method-assign]
    return fleet


class Overridable:
    """An engine as a keeper knows it, with what a test has put in place of its methods."""

    def __init__(self, engine: "LocalRollout") -> None:
        self._engine = engine

    def generate(self, *args: Any) -> Iterator[Any]:
        return self._engine.generate_samples(*args)

    def abort(self) -> None:
        self._engine.abort()


class LocalRollout:
    def __init__(self, config: RunConfig, index: int) -> None:
        self.name = f"rollout:{index}"
        self.engine = engine_of(config.model.path, view(config.rollout, reader_of("rollout"), "rollout"))
        self.batch_invariant = self.engine.batch_invariant()
        self.generated_groups = 0
        self._samples = SampleEngine(lambda: self.open(), self.engine.abort)
        self.serving = threading.Lock()

    def ensure_alive(self) -> None:
        pass

    def open(self) -> Stream:
        return Counted(self.engine.open(), self)

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        stream = Counted(self.engine.open(), self)
        stream.submit(requests)
        return stream

    def keep(self, make: Callable[[], Keeper]) -> Iterator[Any]:
        with closed_in_the_end(make()) as keeper:
            yield from keeper.generate(Overridable(self))
            usage = self.usage()
            result = keeper.finish()
        yield Finished(result, usage)

    def generate_samples(self, *args: Any) -> Iterator[Any]:
        return self._samples.generate(*args)

    def join(self, samples: Sequence[SampleRequest]) -> bool:
        return self._samples.join(samples)

    def retracted(self) -> list[Completion]:
        return self.engine.retracted()

    def acknowledge(self, number: int) -> None:
        self._samples.acknowledge(number)

    def abort(self) -> None:
        self._samples.abort()

    @property
    def environment(self) -> Environment:
        return self.engine.environment()

    def usage(self) -> dict[str, int]:
        return {**self.engine.usage(), "restarts": 0}


class LocalTraining:
    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.updates = 0
        self.restarts = -1
        self.restart()

    def restart(self) -> None:
        self.restarts += 1
        self._versions = VersionWriter()
        self.copied: tuple[int, str | None] = (0, None)
        config = self._config
        self.engine = make_engine(
            config.model,
            config.training,
            config.algorithm,
            temperature=config.rollout.rollout_temperature,
            total_steps=config.rollout.num_rollout * config.training.num_steps_per_rollout,
        )

    def living_position(self) -> Position:
        return self.engine.position()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.updates += 1
        return self.engine.train(*args, **kwargs)

    def holds_copy(self, version: int | None, state_digest: str | None) -> bool:
        copy = self.engine._copy  # type: ignore[attr-defined]
        return copy is not None and (copy.weight_version, copy.state_digest) == (version, state_digest)

    def copy_version(self, version: int, dtype: str, digest: str, base: str | None) -> None:
        self._versions.copy(self.engine.export_weights(FILE_BYTES), getattr(torch, dtype), digest, base)
        self.copied = (version, digest)

    def holds_version(self, version: int | None, digest: str | None) -> bool:
        return self.copied == (version, digest)

    def write_version(self, store_url: str, folder: str) -> list[StoredFile]:
        return self._versions.write(open_store(store_url), folder)

    def write_copy(self, store_url: str, folder: str) -> list[StoredFile]:
        store = open_store(store_url)
        files = self.engine.write_copy(store, folder)
        return [*files, self.engine.describe_copy(store, folder, files[-1:])]

    def save(self, store_url: str, folder: str) -> list[StoredFile]:
        return self.engine.save(open_store(store_url), folder)

    def load(self, store_url: str, folder: str, size: int = 0) -> None:
        self.engine.load(open_store(store_url), folder)

    def export_hf(self, version: int, folder: Path) -> None:
        if self.engine.position().weight_version != version:
            raise WrongVersion(f"the trainer does not stand at weight version {version}")
        self.engine.export_hf(folder)

    @property
    def environment(self) -> Environment:
        return self.engine.environment()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class LocalFleet:
    """`cairn.engines.fleet.fleet.Fleet` without actors: its processes cannot die, so nothing here restarts them."""

    reads_store = False

    def __init__(self, config: RunConfig) -> None:
        self.rollout = [
            LocalRollout(config, index)
            for index in range(config.rollout.num_engines if config.needs_rollout_engines else 0)
        ]
        self.membership = Membership(self.rollout)  # type: ignore[arg-type]
        self.training = LocalTraining(config)
        model = config.reward.reward_model
        self.scorer = None if model is None else RewardModel(model)
        self._published: dict[int, list[dict[str, Any]]] = {}
        self._dtype = config.rollout.dtype
        self.turns = Turns([], self.training, config.fleet)  # type: ignore[arg-type]

    @property
    def weights(self) -> "LocalFleet":
        """The exchange of weights: this fleet itself."""
        return self

    def close(self) -> None:
        """Return its rollout engines to the spare ones."""
        for handle in self.rollout:
            release(handle.engine)

    def seconds_until_drained(self) -> float | None:
        return None

    def generating_environment(self, engine: LocalRollout) -> Environment:
        return engine.environment

    def publish(self, version: int, keep: int) -> Publication:
        self.turns.for_training()
        if self.training.engine.position().weight_version != version:
            raise WrongVersion(f"the trainer does not stand at weight version {version}")
        buckets = [
            {name: tensor.clone() for name, tensor in bucket.items()}
            for bucket in self.training.engine.export_weights(1 << 20)
        ]
        self._published.pop(version, None)
        self._published[version] = buckets
        for old in list(self._published)[:-keep]:
            del self._published[old]
        return Publication(version, self.training.engine.weights_checksum(self._dtype))

    def published(self) -> set[int]:
        return set(self._published)

    def updates_in_flight(self) -> bool:
        return True

    def update(self, handle: LocalRollout, version: int) -> float:
        with handle.serving:
            if version not in self._published:
                raise PublicationGone(f"weight version {version} is not published any more")
            began = time.perf_counter()
            handle.engine.begin_weight_update(version, in_flight=True)
            for bucket in self._published[version]:
                handle.engine.update_weights(bucket)
            handle.engine.end_weight_update()
            return time.perf_counter() - began

    def serve(
        self, handle: LocalRollout, version: int, beside: Sequence[LocalRollout] = (), *, checked_within: float = 0.0
    ) -> None:
        with handle.serving:
            if handle.engine.get_weight_version() == version:
                return
            if version not in self._published:
                raise PublicationGone(f"weight version {version} is not published any more")
            handle.engine.begin_weight_update(version)
            for bucket in self._published[version]:
                handle.engine.update_weights(bucket)
            handle.engine.end_weight_update()
