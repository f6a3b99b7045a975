"""Publications: weight versions that rollout engines can fetch, each with the digest that it must have there.

The trainer continues with other versions while engines fetch. The transport determines what engines fetch from, and how
long that lasts: see `cairn.engines.fleet.weights.transports`.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Literal

from ray.exceptions import ObjectLostError

from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.fleet.training import TrainingHandle
from cairn.engines.fleet.weights.transports import Transport
from cairn.engines.types.errors import EngineError, PublicationGone, WrongVersion
from cairn.engines.types.types import Publication
from cairn.storage.store.errors import NoSpace


class Publications:
    """The last publications of a fleet. Threads may share it, except for `publish`, which needs the trainer to
    itself."""

    def __init__(self, training: TrainingHandle, transport: Transport, dtype: Literal["float32", "bfloat16"]) -> None:
        self._training = training
        self._transport = transport
        self._dtype: Literal["float32", "bfloat16"] = dtype
        self._laid: dict[int, tuple[Publication, Any]] = {}
        """Publications by version, in the order of publication, each with what its transport's `lay` returned."""
        self._lock = threading.Lock()

    def publish(self, version: int, keep: int) -> Publication:
        """Publish the trainer's weights. Earlier publications stay if they are among the last `keep`, the new one
        included.

        Raises:
            WrongVersion: the trainer is not at `version`.
            EngineError, NoSpace: the weights could not be published.
        """
        publication = Publication(version, self._training.checksum_at(version, self._dtype))
        with self._lock:
            earlier, laid = self._laid.pop(version, (None, None))
        if earlier != publication:
            try:
                laid = self._transport.lay(version)
            except (EngineError, NoSpace):
                with self._lock:
                    kept = set(self._laid)
                with contextlib.suppress(EngineError):
                    self._transport.keep(kept)  # a part of it is of no use, and takes room
                raise
        with self._lock:
            self._laid[version] = (publication, laid)
            for old in list(self._laid)[:-keep]:
                del self._laid[old]
            kept = set(self._laid)
        self._transport.keep(kept)
        return publication

    def get(self, version: int) -> Publication:
        """Return a publication. Raises PublicationGone."""
        return self._find(version)[0]

    def versions(self) -> set[int]:
        """Return the versions that an engine can be updated to now."""
        with self._lock:
            laid = set(self._laid)
        return {version for version in laid if self._transport.holds(version)}

    def send(self, version: int, target: RolloutHandle) -> None:
        """Send the weights of a publication to an engine that has begun an update. Weights may be sent to several
        engines at a time.

        Raises:
            PublicationGone: the publication was removed or lost.
            EngineError: an engine died, hung or refused.
        """
        _, laid = self._find(version)
        try:
            self._transport.send(version, laid, target)
        except WrongVersion as error:
            raise self._gone(version) from error
        except Exception as error:
            if any(isinstance(cause, ObjectLostError) for cause in _causes(error)):
                self.drop(version)
                raise self._gone(version) from error
            raise

    def drop(self, version: int) -> None:
        """Forget a publication that is of no use."""
        with self._lock:
            self._laid.pop(version, None)

    def close(self) -> None:
        """Remove all publications."""
        with self._lock:
            self._laid.clear()
        self._transport.close()

    def _find(self, version: int) -> tuple[Publication, Any]:
        with self._lock:
            found = self._laid.get(version)
        if found is None:
            raise self._gone(version)
        return found

    def _gone(self, version: int) -> PublicationGone:
        with self._lock:
            others = ", ".join(map(str, sorted(self._laid.keys() - {version}))) or "none"
        return PublicationGone(
            f"weight version {version} is not published any more (published: {others}): bring the trainer to it and "
            "publish it again"
        )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        yield from (cause for cause in [getattr(error, "cause", None)] if isinstance(cause, BaseException))
        error = error.__cause__
