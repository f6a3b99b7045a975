"""Work of one rollout engine for a stream, in two threads: one runs its generation, the other sends it news meanwhile.

| event during the work | message to the engine |
|---|---|
| weights are published | continue with them, between two decoding steps |
| the engine gets more groups | generate these too |
| neither is possible, others get its groups, a caller needs the engines, the stream ends | return unfinished samples |

The last message is repeated until the engine notices it: a message that arrives before the engine begins has no effect.

A lost engine leaves an elastic fleet, and other engines resume its work (`cairn.engines.fleet.membership`). Any other
failure is an error of the stream.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from cairn.engines.types.errors import EngineDied, EngineTimeout
from cairn.engines.types.trajectories import FIRST_CALL, GeneratedSample, SampleRequest, Segment, Trajectory
from cairn.engines.types.types import FinishReason
from cairn.storage.ledger.commits import Commit
from cairn.tasks.durable.step import StepCall
from cairn.tasks.durable.versions import version_of
from cairn.tasks.generation.generation import generate_samples
from cairn.tasks.generation.rollout import sampling_params
from cairn.tasks.generation.rounds import longest_first
from cairn.tasks.streaming.state import StreamState
from cairn.tasks.trainer.sync import serve, update

_RESEND_INTERVAL = 0.02
"""Seconds after which an interruption that the engine has not noticed is sent again."""

_MOST_LOSSES = 3
"""Number of lost engines between two batches that is an error, if their machines stay: a prompt may end them. Fewer
losses may come from machines whose loss was not noticed yet."""


class EngineWork:
    """Work of one engine of a driver. Callers hold the state's `changed`, except for `begin` and `wait`."""

    def __init__(self, call: StepCall, number: int, state: StreamState) -> None:
        """Create the work. `number`: the engine's number in its fleet."""
        self._run = call.run
        self._call = replace(call, shard=f"stream-{number}")
        self._number = number
        self._engine = call.run.fleet.rollout[number]
        self._state, self._changed = state, state.changed
        self._working = False
        self._ready = False
        """Whether the engine works and may receive news."""
        self._sending = False
        """Whether a message to the engine is under way."""
        self._lost = False
        """Whether its loss was counted. Both threads may notice it."""
        self._interrupted = threading.Event()
        self._groups = set[int]()
        """Groups with samples in flight."""
        self._serves: Commit | None = None
        """Weights that it works with, or is being updated to."""
        self._adding = threading.Lock()
        self._added: list[SampleRequest] = []
        """Samples that joined those in flight, and that the generating thread has not noticed yet."""
        self._since = 0.0
        """Monotonic time up to which its work was counted, if it works."""
        self._threads = [
            threading.Thread(target=does, name="stream", daemon=True) for does in (self._generate, self._send_news)
        ]

    def begin(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Wait for the end of the threads, after the stream was marked as closed."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    @property
    def is_idle(self) -> bool:
        """Whether no thread calls the engine."""
        return not self._working and not self._sending

    def interrupt(self) -> None:
        """Have the engine return its unfinished samples."""
        if self._working:
            self._interrupted.set()
            self._changed.notify_all()

    def interrupt_if_moved(self) -> None:
        """Interrupt the engine if it must not continue: it has left the fleet, or one of its groups belongs to another
        engine. Call it after engines have joined or left."""
        own = (self._state.open.get(id) for id in self._groups)
        if not self._serves_the_run() or any(one is not None and one.engine != self._number for one in own):
            self.interrupt()

    def count(self) -> None:
        """Add its working time until now to the usage."""
        now = time.monotonic()
        if self._working:
            self._state.usage.seconds += now - self._since
            self._since = now

    def _generate(self) -> None:
        """Run all generation of the engine, in a thread of its own."""
        run, state = self._run, self._state
        while True:
            with self._changed:
                self._changed.wait_for(lambda: state.closed or (self._may_work() and self._has_samples()))
                if state.closed:
                    return
                samples, weights = state.samples_of(self._number), state.weights
                rows = {sample.group_id: state.open[sample.group_id].group.prompt.index for sample in samples}
                samples = longest_first(samples, run.response_lengths.means(rows))
                self._interrupted.clear()
                self._begin(samples)
                self._serves, self._added, self._lost = weights, [], False
                self._working, self._since = True, time.monotonic()
            try:
                serve(run, self._engine, weights)
                with self._changed:
                    self._ready = True
                    self._changed.notify_all()
                for generated in generate_samples(
                    self._call,
                    self._engine,
                    weights,
                    state.calls.with_logged_calls(samples),
                    sampling_params(run.config, with_support=run.records_support),
                    rows=rows,
                    calls=state.calls,
                    interrupted=lambda: self._interrupted.is_set() or run.stopping.is_set(),
                    newest=lambda: self._serves,
                    joined=self._take_added,
                ):
                    self._record(generated)
            except Exception as error:
                self._fail(error)
            finally:
                with self._changed:
                    self.count()
                    self._working = self._ready = False
                    groups, self._groups = self._groups, set()
                    for id in groups:
                        state.end(id)
                    self._changed.notify_all()

    def _send_news(self) -> None:
        """Send the engine messages while it works, in a thread of its own."""
        state = self._state
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_news() or (state.closed and not self._working))
                if not self._has_news():
                    return
                interrupted, behind, weights = self._interrupted.is_set(), self._is_behind(), state.weights
                self._sending = True
            try:
                if interrupted:
                    with suppress(Exception):  # the generating thread gets the error
                        self._engine.abort()
                elif behind:
                    self._update(weights)
                else:
                    self._add()
            except Exception as error:
                self._fail(error)
                with self._changed:
                    self._interrupted.set()
            finally:
                with self._changed:
                    self._sending = False
                    self._changed.notify_all()
            if interrupted:
                time.sleep(_RESEND_INTERVAL)

    def _serves_the_run(self) -> bool:
        return self._engine in self._run.fleet.membership.members

    def _may_work(self) -> bool:
        state = self._state
        may = not state.pauses and not self._sending and state.error is None and not self._run.stopping.is_set()
        return may and self._serves_the_run()

    def _has_news(self) -> bool:
        if self._working and self._interrupted.is_set():
            return True
        return self._is_behind() or (self._accepts_news() and self._has_samples())

    def _has_samples(self) -> bool:
        return self._state.has_samples_for(self._number)

    def _accepts_news(self) -> bool:
        return self._ready and not self._interrupted.is_set() and self._state.error is None

    def _is_behind(self) -> bool:
        return self._accepts_news() and version_of(self._serves) != version_of(self._state.weights)

    def _fail(self, error: Exception) -> None:
        """Handle an error. The others continue without a lost engine where they can. The next `take` raises any other
        error."""
        state = self._state
        if isinstance(error, EngineDied | EngineTimeout):
            if self._run.fleet.membership.leave(self._engine, str(error)):
                return
            with self._changed:
                state.losses += not self._lost
                self._lost = True
                if not self._serves_the_run() and state.losses < _MOST_LOSSES:
                    return
        with self._changed:
            state.error = state.error or error

    def _begin(self, samples: Sequence[SampleRequest]) -> None:
        self._groups |= {sample.group_id for sample in samples}
        self._state.begin(samples)

    def _end(self, sample: SampleRequest | GeneratedSample) -> None:
        if sample.group_id not in self._groups:  # all its samples were returned meanwhile
            return
        self._state.end(sample.group_id, sample.index)
        if sample.group_id not in self._state.running:
            self._groups.discard(sample.group_id)

    def _record(self, samples: Sequence[GeneratedSample]) -> None:
        """Record samples that have ended or were interrupted."""
        state = self._state
        with self._changed:
            for sample in samples:
                if sample.group_id in state.open:  # or it was taken
                    state.usage.interrupted_samples += sample.finish_reason == FinishReason.ABORT
                self._end(sample)
            state.note(samples, self._number)
            self._changed.notify_all()

    def _update(self, weights: Commit | None) -> None:
        """Have the engine continue with newer weights. What it had decoded until then is logged, and is durable
        soon."""
        run, state = self._run, self._state
        if not run.fleet.weights.updates_in_flight():
            with self._changed:
                self._interrupted.set()
            return
        with self._changed:
            self._serves = weights
        seconds = update(run, self._engine, weights)
        parts = self._engine.retracted()
        with self._changed:
            state.usage.stall += seconds
            state.usage.interrupted_samples += len(parts)
            state.usage.recomputed_tokens += sum(len(part.response_ids) for part in parts)
            samples = []
            for part in parts:
                group, index, *_ = part.request_id
                request = state.running.get(group, {}).get(index)
                if request is None or state.calls.records:
                    continue
                segment = Segment.sampled(part, FIRST_CALL, request.seed)
                if request.begun is not None:
                    state.usage.recomputed_tokens += len(request.begun)
                    segment = request.begun.then(segment)
                samples.append(GeneratedSample(*request.key, Trajectory((segment,)), FinishReason.ABORT))
            state.note(samples, self._number)

    def _add(self) -> None:
        """Add samples of new groups to those in flight. If the engine accepts none, interrupt it."""
        with self._adding:
            with self._changed:
                samples = self._state.samples_of(self._number)
                self._begin(samples)
            if self._engine.join(samples):
                self._added += samples
                return
            with self._changed:
                for sample in samples:
                    self._end(sample)
                self._interrupted.set()

    def _take_added(self) -> list[SampleRequest]:
        with self._adding:
            samples, self._added = self._added, []
            return samples
