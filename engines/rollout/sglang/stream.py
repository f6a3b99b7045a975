"""A stream of requests to SGLang's servers."""

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from cairn.engines.errors import RequestRefused
from cairn.engines.rollout.sglang.generation import Generation
from cairn.engines.types import Completion, GenerateRequest, RequestId


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
        self._left = 0
        self._ended: queue.SimpleQueue[Future[Completion]] = queue.SimpleQueue()
        self._refused: dict[RequestId, str] = {}

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._check(requests)
        self._left += len(requests)
        for future in self._generation.submit(requests):
            future.add_done_callback(self._ended.put)

    def __iter__(self) -> "ServerStream":
        return self

    def __next__(self) -> list[Completion]:
        while self._left:
            self._left -= 1
            future = self._ended.get()
            error = future.exception()
            if error is None:
                return [future.result()]
            if not isinstance(error, RequestRefused):
                self.close()
                raise error
            self._refused |= error.refused
        if self._refused:
            refused, self._refused = self._refused, {}
            raise RequestRefused(refused)
        raise StopIteration

    def abort(self) -> None:
        self._generation.abort()

    def close(self) -> None:
        self._left = 0
        self._generation.close()

    def __del__(self) -> None:
        self._generation.close()
