"""A stream of requests to SGLang's servers."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from cairn.engines.errors import RequestRefused
from cairn.engines.rollout.sglang.generation import Generation
from cairn.engines.types import Completion, GenerateRequest


class ServerStream:
    """A `Stream`.

    Args:
        check: raises where requests cannot be served.
    """

    def __init__(
        self, generation: Generation, check: Callable[[Sequence[GenerateRequest]], None] = lambda requests: None
    ) -> None:
        self._generation = generation
        self._check = check
        self._lock = threading.Lock()
        self._asked = self._taken = 0
        """Requests, and those of which is known what became of them."""
        self._ended: queue.SimpleQueue[Future[Completion]] = queue.SimpleQueue()

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._check(requests)
        with self._lock:
            for future in self._generation.submit(requests):
                self._asked += 1
                future.add_done_callback(self._ended.put)

    def __iter__(self) -> "ServerStream":
        return self

    def __next__(self) -> list[Completion]:
        if self._taken >= self._asked:
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
            self._taken = self._asked

    def __del__(self) -> None:
        self._generation.close()
