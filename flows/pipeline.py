"""Scheduling: which halves of which iterations run concurrently.

With a lag of k, an iteration is collected with weights that are k iterations older than the newest, while the newer
ones are still being trained:

    k = 1   collect 0 │ collect 1 │ collect 2 │ collect 3 │
                      │ learn 0   │ learn 1   │ learn 2   │ learn 3

    a half          starts after
    collect of i    the batch of i-1, and all of iteration i-1-k: this iteration samples from its weights
    learn of i      the batch of i, and all of `learn` of i-1. While it waits for `learn` of i-1, advantages are
                    estimated ahead where the iteration has no score step
    evaluation of i its weights are there; it has the rollout engines to itself

With `streaming` and a maximum age k, samples are generated all the time (`cairn.flows.streaming`). An iteration is
first admitted and then collected:

    admit of i      all of iteration i-1-k: its samples may be at most k weight updates old when they are trained on;
                    and the engines would otherwise run out of work (`cairn.tasks.streaming.stream`)
    collect of i    its admission, and the batch of i-1

Before an iteration is collected, or admitted, a person may have to approve it (`cairn.flows.driver.approval`). The
halves of earlier iterations continue meanwhile.

A checkpoint is written while the next iterations run (`cairn.tasks.trainer.checkpoint`), and so are weights that the
run stores, whose commit comes before any of iteration i+1+k (`cairn.tasks.trainer.sync`). The flow run of their
iteration ends when both are committed; one checkpoint and one version of the weights are written at a time.

So k + 1 iterations are open at a time, each in its own flow run and thread. The flow run of the next iteration is
created ahead and waits; without a lag, it is created while the previous iteration learns. No half's inputs depend on
which half is faster: `cairn.flows.iteration` selects the inputs by iteration number. A half that fails stops all
others.
"""

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

from cairn.flows.driver.approval import Withheld
from cairn.flows.events import Stopping
from cairn.flows.iteration import admit, collect, estimate_ahead, evaluate_after, learn
from cairn.flows.step_runner import Pending, StepRunner
from cairn.storage.ledger.commits import Commit, Step
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.evaluation.evaluate import eval_due
from cairn.tasks.halves import newest_sampled, weights_after
from cairn.tasks.streaming.stream import Pacing, Stream

Iterate = Callable[[int], list[Commit]]
"""Function that executes the iteration with a number and returns its commits."""


class Pipeline:
    """The iterations of a run from `first` on, executed by one driver."""

    def __init__(
        self,
        run: RunContext,
        steps: StepRunner,
        first: int,
        *,
        learned: Callable[[int], None],
        saved: Callable[[], None] = lambda: None,
        stop: Callable[[], None],
        approved: Callable[[int], None] = lambda index: None,
    ) -> None:
        """
        Args:
            first: first iteration to execute; all earlier ones are complete.
            approved: returns when an iteration may begin; raises Withheld if it may not.
            learned: called when an iteration's weights are published, before the next update begins.
            saved: called when a checkpoint is committed, at any time and by one thread at a time.
            stop: makes running halves end soon.
        """
        self._run, self._steps = run, steps
        self._learned, self._saved, self._stop, self._approved = learned, saved, stop, approved
        self._tidying = threading.Lock()
        self._saving: Pending | None = None
        """The newest step `checkpoint`."""
        self._lag = run.config.rollout.weights_lag
        self._changed = threading.Condition()
        self._sampling = threading.Lock()
        """Lock of the rollout engines: held by a half that collects or evaluates."""
        self._last = dict.fromkeys(("admit", "collect", "learn", "all"), first - 1)
        """Newest iteration for which each half is complete."""
        self._failed: BaseException | None = None
        self._first = first
        self._make_next: Callable[[int], None] = lambda index: None
        """Creates the flow run of an iteration, which waits until the iteration may begin."""
        self._pacing = Pacing(run.config.rollout, first)

    def iterate(self, index: int) -> list[Commit]:
        """Execute one iteration, each half when it may begin. Body of the iteration's flow run."""
        run, steps, stream = self._run, self._steps, self._run.attached(Stream)
        collected = self._collected(index) if stream is None else self._streamed(index, stream)
        waited = self._last["learn"] == index - 1
        advantages = None if waited else self._estimated_ahead(index)
        with self._half("learn", index, after={"learn": index - 1}):
            if not self._lag:
                self._make_next(index + 1)
            if stream is not None:
                self._pacing.learns(index, waited=waited)
                stream.recheck()
            learned, saving, storing = learn(run, steps, index, advantages, self._saving)
            self._saving = saving or self._saving
            if stream is not None:
                self._publish_to_stream(stream, index)
            self._learned(index)
        with self._half("all", index, after={"all": index - 1}):
            evaluated = self._evaluated(index)
            if self._lag:
                self._make_next(index + self._lag + 2)
        if storing is not None:
            learned.append(storing.result())
        if saving is not None:
            learned.append(saving.result())
            with self._tidying:
                self._saved()
        return [*collected, *learned, *evaluated]

    def _collected(self, index: int) -> list[Commit]:
        with self._half("collect", index, after={"collect": index - 1, "all": index - 1 - self._lag}):
            self._begin(index)
            with self._sampling:
                return collect(self._run, self._steps, index)

    def _streamed(self, index: int, stream: Stream) -> list[Commit]:
        with self._half("admit", index, after={"admit": index - 1, "all": self._published_for(index)}):
            self._begin(index)
            if self._run.find(index, Step.ADMIT, "00") is None:
                stream.wait_until(self._pacing.wants_more)
                self._wait({}, f"admit of iteration {index}")  # the driver may have ended that
            admitted = admit(self._run, self._steps, index)
        with self._half("collect", index, after={"collect": index - 1}):
            return [*admitted, *collect(self._run, self._steps, index)]

    def _estimated_ahead(self, index: int) -> Commit | None:
        """Return the advantages of an iteration, estimated before `learn` of the previous iteration ends.

        Returns None after an error: `learn` then estimates them again. The previous iteration must complete first, so
        that a person can fork the run there.
        """
        try:
            return estimate_ahead(self._run, self._steps, index)
        except Stopping:
            raise
        except Exception as error:
            sentence = f"Iteration {index}: its advantages are estimated again after iteration {index - 1} has trained"
            self._run.emit(Message(f"{sentence}: {error}", "warning"))
            return None

    def _publish_to_stream(self, stream: Stream, index: int) -> None:
        """Publish new weights to the stream, every `update_weights_interval` iterations."""
        run = self._run
        if newest_sampled(run.config.rollout, index) == index:
            stream.publish(weights_after(run, index))

    def _published_for(self, index: int) -> int:
        """Return the oldest iteration whose weights may generate the samples of an admission. The engines must not hold
        older weights from then on."""
        interval = self._run.config.rollout.update_weights_interval
        return newest_sampled(self._run.config.rollout, index - 2 - self._lag + interval)

    def _evaluated(self, index: int) -> list[Commit]:
        run = self._run
        if not eval_due(run.config, index):
            return []
        stream = run.attached(Stream)
        with self._sampling, nullcontext() if stream is None else stream.paused():
            return evaluate_after(run, self._steps, index)

    def run(self, iterate: Iterate, total: int) -> Generator[tuple[int, list[Commit]]]:
        """Call `iterate`, a flow around `Pipeline.iterate`, for every iteration; yield each index and its commits in
        order.

        A caller that does not exhaust the generator must close it. Raises the error of the first half that failed,
        after all others have ended.
        """
        self._run.side_by_side = self._lag > 0
        context = contextvars.copy_context()  # contains Prefect's record of the driver's flow run
        pool = ThreadPoolExecutor(self._lag + 3, thread_name_prefix="iteration")
        begun: deque[tuple[int, Future[list[Commit]]]] = deque()

        def begin(index: int) -> None:
            if index >= total:
                return
            with self._changed:
                if self._failed is not None:
                    return
                future = pool.submit(context.copy().run, iterate, index)
            begun.append((index, future))
            future.add_done_callback(self._watch)

        ahead = self._lag + 2 if self._lag else 1
        self._make_next = begin
        try:
            for index in range(self._first, self._first + ahead):
                begin(index)
            while begun:
                index, future = begun.popleft()
                yield index, future.result()
        except BaseException as error:
            self._fail(error)
            pool.shutdown(cancel_futures=True)
            raise (self._failed or error) from None
        pool.shutdown()

    def _begin(self, index: int) -> None:
        try:
            self._approved(index)
        except Withheld:
            self._wait({"all": index - 1}, f"iteration {index}")  # earlier iterations must complete
            raise

    @contextmanager
    def _half(self, name: str, index: int, *, after: dict[str, int]) -> Iterator[None]:
        self._wait(after, f"{name} of iteration {index}")
        yield
        with self._changed:
            self._last[name] = index
            self._changed.notify_all()

    def _wait(self, after: dict[str, int], what: str) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._failed is not None or all(self._last[half] >= least for half, least in after.items())
            )
            if self._failed is not None:
                raise Stopping(f"the driver ends: {what} does not begin")

    def _watch(self, future: "Future[list[Commit]]") -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failed is not None:
                return
            self._failed = error
            self._changed.notify_all()
        self._stop()
