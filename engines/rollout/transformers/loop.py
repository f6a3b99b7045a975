"""Decoding for several streams at a time, in the threads that wait for samples.

There is no thread of its own. Of the threads that wait for a sample, one decodes for all, until one of its own samples
has ended; then the next thread does. If no thread waits, nothing is decoded, so that an engine is never ahead of a
single reader.

Between two steps all samples may be retracted. They are paused while weights are replaced. Then they resume as requests
for their rest, after a fresh prefill.
"""

import threading
import time
import weakref
from collections.abc import Callable, Sequence

from cairn.engines.rollout.admission import Occupancy
from cairn.engines.rollout.requests import validate_requests
from cairn.engines.rollout.transformers.batch import Sample, StopStrings, samples_of
from cairn.engines.rollout.transformers.decoder import Decoder
from cairn.engines.rollout.transformers.decoding import Decoding
from cairn.engines.types.errors import EngineError
from cairn.engines.types.types import Completion, GenerateRequest

Result = Completion | Exception


class DecodeLoop:
    """A loop that accepts requests at any time, from any thread; they join between two steps.

    Args:
        end_ids: token ids that end every response, besides each request's own.
        version: returns the version of the weights; raises EngineError where there are none to generate with.
        occupancy: occupancy of the engine.
        stop_strings: stop strings of its requests.
    """

    def __init__(
        self,
        decoder: Decoder,
        end_ids: frozenset[int],
        version: Callable[[], int],
        occupancy: Occupancy,
        stop_strings: StopStrings,
    ) -> None:
        self._decoder = decoder
        self._end_ids = end_ids
        self._version = version
        self._occupancy = occupancy
        self._stop_strings = stop_strings
        self.decoding = Decoding(decoder, end_ids)
        """The current decoding, or the last one that had samples."""
        self._changed = threading.Condition()
        self._streams: weakref.WeakSet[_StreamState] = weakref.WeakSet()
        self._unfinished: dict[Sample, _StreamState] = {}
        """Samples that have not ended, and their clients."""
        self._joining: list[Sample] = []
        """Samples among them that no step has seen yet."""
        self._aborting = False
        """Whether a stream was aborted since the last step."""
        self._paused = False
        self._stepping = False
        self._decodes: threading.Thread | None = None
        """The thread that decodes; None if no thread does."""
        self._weights = 0
        self.tokens = 0
        self.seconds = 0.0

    def open(self) -> "LoopStream":
        """Open a stream for one client."""
        stream = _StreamState()
        with self._changed:
            self._streams.add(stream)
        return LoopStream(self, stream)

    def submit(self, stream: "_StreamState", requests: Sequence[GenerateRequest]) -> None:
        """Submit requests; see `Stream.submit`."""
        decoder = self._decoder
        validate_requests(requests, decoder.context_length, decoder.vocab_size, decoder.image_problem)
        samples = samples_of(requests, self._stop_strings.watch)
        self._occupancy.enter(len(samples))
        try:
            with self._changed:
                version = self._version()  # under the lock, so that `resume` after an update overrides it
                if not self._unfinished and samples:
                    self._weights, self.decoding = version, Decoding(self._decoder, self._end_ids)
                self._unfinished |= dict.fromkeys(samples, stream)
                self._joining += samples
                self._aborting |= stream.aborted
                stream.left += len(samples)
                self._changed.notify_all()
        except EngineError:
            self._occupancy.leave(len(samples))
            raise

    def wait(self, stream: "_StreamState") -> list[Result]:
        """Return the client's results since the last call; wait for at least one. Returns nothing where no request is
        left."""
        with self._changed:
            self._changed.wait_for(lambda: self._decodes is None or stream.ended or not stream.left)
            if stream.ended or not stream.left:
                return stream.take()
            self._decodes = threading.current_thread()
        try:
            while stream.left and not stream.ended:  # none are left if `close` has taken the results
                self._step()
        finally:
            with self._changed:
                self._decodes = None
                self._changed.notify_all()
        return stream.take()

    def abort(self, stream: "_StreamState | None" = None) -> None:
        """Abort all requests of one client, later ones included, or those of all clients."""
        with self._changed:
            for one in [stream] if stream is not None else self._streams:
                one.aborted = True
            self._aborting = True
            self._changed.notify_all()

    def pause(self) -> None:
        """Retract all samples, and decode nothing until `resume`. Returns when no step is running any more: after at
        most one step, however it ends."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._stepping)
            decoded = {sample for sample in self._unfinished if sample not in self._joining}
            ended = [one for one in self.decoding.leave(decoded, self._weights) if one[0] in decoded]
            failed = [(sample, result) for sample, result in ended if isinstance(result, Exception)]
            self._deliver(failed)
            parts = {sample: result for sample, result in ended if isinstance(result, Completion)}
            self.tokens += sum(len(part.response_ids) for part in parts.values())
            retracted = {sample: self._retracted(sample, part) for sample, part in parts.items()}
            self._unfinished = {retracted.get(sample, sample): stream for sample, stream in self._unfinished.items()}
            self._joining = [*retracted.values(), *self._joining]

    def resume(self, version: int) -> None:
        """Resume decoding, with weights of another version."""
        with self._changed:
            self._weights, self._paused = version, False
            self._changed.notify_all()

    def retracted(self) -> list[Completion]:
        """Return what unfinished samples had when they were last retracted, if they were."""
        with self._changed:
            return [
                sample.part for sample in self._unfinished if sample.part is not None and len(sample.part.response_ids)
            ]

    def _retracted(self, sample: Sample, part: Completion) -> Sample:
        (resumed,) = samples_of([sample.request.after(part)], self._stop_strings.watch)
        resumed.part = part if sample.part is None else sample.part.then(part)
        return resumed

    @property
    def decodes_here(self) -> bool:
        """Whether the current thread is the one that decodes."""
        return self._decodes is threading.current_thread()

    def _step(self) -> None:
        """Let new samples join, end aborted ones, and take one step."""
        with self._changed:
            self._changed.wait_for(lambda: not self._paused or self._aborting)
            paused = self._paused
            joining, self._joining = self._joining, []
            leaving = {one for one, stream in self._unfinished.items() if stream.aborted} if self._aborting else set()
            self._aborting, self._stepping = False, True
        began = time.perf_counter()
        ended: list[tuple[Sample, Result]] = []
        try:
            self.decoding.join(joining)
            if leaving:
                ended += self.decoding.leave(leaving, self._weights)
            if not paused and (self.decoding.running or self.decoding.queued):
                ended += self.decoding.step(self._weights)
        except Exception as error:
            self._fail_step(error)
        except BaseException:
            self._fail_step(EngineError("The step in which it was generated was interrupted."))
            raise
        else:
            self.tokens += sum(len(result.response_ids) for _, result in ended if isinstance(result, Completion))
            self.seconds += time.perf_counter() - began
            self._deliver(ended)
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()

    def _fail_step(self, error: Exception) -> None:
        """Discard the remains of a failed step, and fail the samples that were in it."""
        self._decoder.forget()
        self.decoding = Decoding(self._decoder, self._end_ids)
        with self._changed:
            new = set(self._joining)
            self._deliver([(sample, error) for sample in self._unfinished if sample not in new])

    def _deliver(self, ended: Sequence[tuple[Sample, Result]]) -> None:
        """Give each stream its own results."""
        if not ended:
            return
        with self._changed:
            for sample, result in ended:
                stream = self._unfinished.pop(sample)
                stream.left -= 1
                if sample.part is not None and isinstance(result, Completion):
                    result = sample.part.then(result)
                stream.ended.append(result)
            self._occupancy.leave(len(ended))
            self._changed.notify_all()


class _StreamState:
    """The loop's state of one stream."""

    def __init__(self) -> None:
        self.aborted = False
        self.left = 0
        """Number of requests that have not ended."""
        self.ended: list[Result] = []
        """Results that were not taken yet."""

    def take(self) -> list[Result]:
        """Return these results, and clear them."""
        ended, self.ended = self.ended, []
        return ended


class LoopStream:
    """A `Stream` of a `DecodeLoop`. A stream without references closes itself."""

    def __init__(self, loop: DecodeLoop, stream: _StreamState) -> None:
        self._loop = loop
        self._state = stream
        self._error: Exception | None = None

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._loop.submit(self._state, requests)

    def __iter__(self) -> "LoopStream":
        return self

    def __next__(self) -> list[Completion]:
        results = [] if self._error is not None else self._loop.wait(self._state)
        completions = [result for result in results if isinstance(result, Completion)]
        self._error = self._error or next((result for result in results if isinstance(result, Exception)), None)
        if completions:
            return completions
        self.close()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopIteration

    def abort(self) -> None:
        self._loop.abort(self._state)

    def close(self) -> None:
        if self._state.left:
            self.abort()
        while self._state.left and not self._loop.decodes_here:  # in that thread the next step ends the stream
            self._loop.wait(self._state)

    def __del__(self) -> None:
        self.close()
