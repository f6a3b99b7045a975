"""What samples ask of an engine: every request gets one answer, and those that come later join those before them."""

import threading
from collections.abc import Sequence

from cairn.engines.errors import EngineError, RequestRefused
from cairn.engines.rollout.streams import Stream
from cairn.engines.types import Completion, GenerateRequest, RequestId

Answers = list[tuple[RequestId, Completion | RequestRefused]]


class Asking:
    """The requests of one stream. One thread takes the answers; another one may ask meanwhile."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._left: set[RequestId] = set()
        """What has no answer yet."""
        self._asked = 0
        """How often something was asked."""
        self._changed = threading.Condition()
        self._over = False

    def submit(self, requests: Sequence[GenerateRequest]) -> Answers:
        """Ask. Returns why some are refused; the others come with `answers`."""
        if not requests:
            return []
        with self._changed:
            refusals: Answers = []
            try:
                self._stream.submit(requests)
            except RequestRefused as refused:
                refusals = _refusals(refused)
                requests = [request for request in requests if request.request_id not in refused.refused]
                self._stream.submit(requests)
            self._left.update(request.request_id for request in requests)
            self._asked += 1
            self._changed.notify_all()
        return refusals

    def answers(self) -> Answers:
        """The next ones; none where everything has its answer. Raises as streams do, and EngineError where one has
        ended without."""
        while True:
            asked, ended = self._asked, False
            try:
                answers: Answers = [(completion.request_id, completion) for completion in next(self._stream)]
            except RequestRefused as refused:
                answers = _refusals(refused)
            except StopIteration:
                answers, ended = [], True
            with self._changed:
                self._left.difference_update(id for id, _ in answers)
                if answers or not self._left:
                    return answers
                if ended and asked == self._asked:
                    lost = ", ".join("/".join(map(str, id)) for id in sorted(self._left))
                    raise EngineError(f"the engine gave fewer samples than asked: without those of requests {lost}")

    def wait(self) -> bool:
        """Until something is asked that has no answer, or nothing more will be: whether there is."""
        with self._changed:
            self._changed.wait_for(lambda: self._left or self._over)
            return not self._over

    def end(self) -> None:
        """Nothing more will be asked, and nobody wants what is on its way."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


def _refusals(refused: RequestRefused) -> Answers:
    return [(id, RequestRefused({id: why})) for id, why in refused.refused.items()]
