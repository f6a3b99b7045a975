"""Stream of a run with `rollout.pipeline: streaming`: samples are generated all the time, independently of learning.

    admit     prompts become open groups, at most `max_age` iterations ahead of learning, and as few as suffice
              (`Pacing`)
    generate  each engine works on the samples of its groups with the newest weights. It receives new weights, between
              two decoding steps, and the samples of new groups while it works
    take      a rollout step takes the groups of its round: complete ones, in the order of completion

What happens here depends on timing, and belongs to no iteration until a rollout step commits which groups it took, with
their samples. The results of an engine are durable before that (`cairn.storage.logs.sample_log`), so the next driver
resumes from them.

A round first takes groups that would otherwise be too old for the next iteration, and waits for those of them that are
incomplete: a bound on age must not starve the prompts with long responses.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.types.errors import EngineError
from cairn.engines.types.trajectories import CallRecord
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.store.errors import Damaged
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.step import Outcome, StepCall, durable
from cairn.tasks.durable.versions import weight_version_after
from cairn.tasks.generation.groups import Group, fresh_group
from cairn.tasks.streaming.engine_work import EngineWork
from cairn.tasks.streaming.state import OpenGroup, OpenLogs, StreamState, Usage

# Pacing of admissions.


_LAST = 3
"""Number of newest batches for which waiting counts: a batch with a long response is not the last of its kind."""


@dataclass(frozen=True)
class Backlog:
    """Admitted groups that no iteration has taken."""

    complete: int
    unfinished: int
    taken: int
    """Newest iteration that has taken groups; -1 before the first."""


class Pacing:
    """Pacing of one driver's admissions. Prompts are admitted as late as possible without idle engines, so that samples
    are young when they are trained on.

    | learning | the next prompts are admitted |
    |---|---|
    | did not wait for any of the last batches | when less than the next batch is admitted |
    | waited for one of them, or none has been timed yet | also when engines have less than a batch to work on |

    The second rule pauses while `async_buffer_size` complete groups, taken or not, wait for learning. The bound on age
    (`rollout.max_age`) applies as well: `cairn.flows.pipeline`.

    One thread at a time reports what is learned from; any thread may query.
    """

    def __init__(self, config: RolloutConfig, first: int) -> None:
        """Create the pacing. `first`: all iterations before it are complete."""
        self._batch, self._buffer = config.rollout_batch_size, config.most_waiting
        self._first = first
        self._learning = first - 1
        self._waited = deque[bool](maxlen=_LAST)

    def learns(self, index: int, *, waited: bool) -> None:
        """Report that learning from an iteration begins. `waited`: whether it waited for its batch."""
        if index > self._first:  # for which it waited in any case
            self._waited.append(waited)
        self._learning = index

    def wants_more(self, backlog: Backlog) -> bool:
        """Return whether to admit another batch of prompts."""
        taken = max(0, backlog.taken - self._learning) * self._batch
        waiting = taken + backlog.complete
        if waiting + backlog.unfinished < self._batch:
            return True
        is_ahead = bool(self._waited) and not any(self._waited)
        return not is_ahead and backlog.unfinished < self._batch and waiting < self._buffer


# Step `admit`.


@durable(Step.ADMIT, reads=("seed", "data", "rollout.rollout_max_prompt_len"), externals=("data", "model"))
def admit(step: StepCall, previous: Commit | None, *, count: int, without: Sequence[int] | None = None) -> Outcome:
    """Admit the `count` prompts that follow those of the admission `previous` and are not among `without`. From then on
    samples of them are generated.

    Each admission begins where the one before has left the data, whichever iteration makes it. So no prompt is drawn
    twice or lost, whatever happens to the driver.
    """
    begin = 0 if previous is None else previous.values["cursor"]
    draw = step.run.draw(begin, count, without or ())
    return Outcome(
        values={
            "number": 0 if previous is None else admission_number(previous) + 1,
            "begin": begin,
            "cursor": draw.cursor,
            "without": list(without or ()),
            "groups": [one.group_id for one in draw.rows],
        },
        metrics={"passed_over_prompts": draw.passed_over},
    )


def admission_number(admission: Commit) -> int:
    """Return the number of an admission among those of the run, from 0."""
    number = admission.values["number"]
    assert isinstance(number, int)
    return number


def admitted_ids(admission: Commit) -> list[int]:
    """Return the ids of an admission's groups."""
    groups = admission.values["groups"]
    assert isinstance(groups, list)
    return groups  # type: ignore[return-value]


def admitted_groups(run: RunContext, admission: Commit) -> list[Group]:
    """Return the groups of an admission, with no sample begun."""
    without = admission.values["without"]
    assert isinstance(without, list)
    draw = run.draw(admission.values["begin"], len(admitted_ids(admission)), without)  # type: ignore[arg-type]
    return [fresh_group(run, admission.iteration, row) for row in draw.rows]


@dataclass(frozen=True)
class Taken:
    """Groups of a round, in the order in which they are taken."""

    groups: tuple[OpenGroup, ...]
    open: dict[str, list[int]]
    """Ids of the groups that stay open, by the names of their admissions."""
    newest: Commit
    """Newest admission."""
    calls: list[CallRecord] | None
    """Recorded calls of their samples; None where nothing is recorded."""
    usage: "Usage"
    """Work of engines since the round before."""
    waited: float
    """Seconds that the round waited."""


class Stream:
    """Stream of one driver. Threads may share it."""

    def __init__(self, call: StepCall, weights: Commit | None, open_logs: OpenLogs, groups: Collection[int]) -> None:
        """Create the stream; use `open_stream` instead.

        Args:
            call: the step call that samples are generated for.
            weights: the newest weights; None for the initial ones.
            groups: ids of the groups that are open now.
        """
        self._run = call.run
        self._state = StreamState(call, weights, open_logs, groups)
        self._changed = self._state.changed
        self._taken = -1
        """Newest iteration that has taken groups."""
        self._newest: Commit | None = None
        self.admitting = threading.Lock()
        """Held during an admission: each admission follows the one before."""
        self._engines = [EngineWork(call, number, self._state) for number in range(len(call.run.fleet.rollout))]

    @property
    def newest_admission(self) -> Commit | None:
        """Admission that the next one follows."""
        return self._newest

    def begin(self) -> None:
        """Start generating."""
        self._run.fleet.membership.changed = self._deal
        self._deal()
        for engine in self._engines:
            engine.begin()

    def close(self) -> None:
        """Stop generating. All samples so far are durable when this returns."""
        self._run.fleet.membership.changed = lambda: None
        with self._changed:
            self._state.closed = True
            self._interrupt_all()
        for engine in self._engines:
            engine.wait()
        self._state.close_logs()

    def follows(self, admission: Commit) -> bool:
        """Return whether an admission comes after all known ones. Raises Damaged where another one has its number."""
        newest = self._newest
        if newest is None:
            return True
        if newest.name != admission.name and admission_number(newest) == admission_number(admission):
            raise Damaged(
                f"{newest.name} and {admission.name} follow the same admission: two drivers made them, with the same "
                "prompts; start a new run from the weights of this one"
            )
        return admission_number(newest) < admission_number(admission)

    def admit(self, admission: Commit, groups: Sequence[Group]) -> None:
        """Open groups of an admission."""
        with self._changed:
            if self._newest is None or admission_number(admission) > admission_number(self._newest):
                self._newest = admission
            self._state.admit(admission, groups, self._serving())

    def publish(self, weights: Commit | None) -> None:
        """Use these weights as the newest from now on."""
        with self._changed:
            self._state.weights = weights
            self._changed.notify_all()

    def take(self, iteration: int, count: int, report: Callable[[int], None]) -> Taken:
        """Wait until a round of an iteration can take `count` groups, and return them. They stay open until `forget`.

        Raises what an engine raised: a new call resumes. `report` is called with the number of complete
        groups.
        """
        began = time.monotonic()
        end = began + self._run.config.rollout.timeout
        bound = self._run.config.rollout.oldest_trained
        oldest = weight_version_after(self._run.ledger, iteration - bound)  # that the next iteration trains on
        state, membership = self._state, self._run.fleet.membership
        with self._changed:
            state.resume()
            while True:
                if state.error is not None:
                    raise state.error
                if self._run.stopping.is_set():
                    raise EngineError("generation was interrupted: the driver stops")
                report(len(state.complete))
                late = {id for id in state.open if state.oldest_version(id, oldest) < oldest}
                awaited = [id for id in late if id not in state.complete] if time.monotonic() < end else []
                if membership.enough() and len(state.complete) >= count and not awaited:
                    break
                self._changed.wait(1.0)
            ordered = sorted(state.complete, key=lambda id: id not in late)
            chosen = ordered[:count]
            left: dict[str, list[int]] = {}
            for id, one in state.open.items():
                if id not in chosen:
                    left.setdefault(one.admission.name, []).append(id)
            for engine in self._engines:
                engine.count()
            usage, state.usage, state.losses = state.usage, Usage(), 0
            assert self._newest is not None
            groups = tuple(state.open[id] for id in chosen)
            return Taken(groups, left, self._newest, state.calls.of(chosen), usage, time.monotonic() - began)

    def forget(self, ids: Collection[int], iteration: int) -> None:
        """Drop these groups, which a rollout step of an iteration has committed."""
        with self._changed:
            self._taken = max(self._taken, iteration)
            self._state.forget(ids)

    @property
    def backlog(self) -> Backlog:
        """Groups that are admitted and not taken."""
        with self._changed:
            complete = len(self._state.complete)
            return Backlog(complete, len(self._state.open) - complete, self._taken)

    def wait_until(self, wants_more: Callable[[Backlog], bool]) -> None:
        """Return when `wants_more` is true for the backlog, or the driver ends. It is called again when the backlog has
        changed, and after `recheck`."""
        with self._changed:
            while not (self._state.closed or self._run.stopping.is_set() or wants_more(self.backlog)):
                self._changed.wait(1.0)

    def recheck(self) -> None:
        """Have `wait_until` call its condition again, because something else has changed."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the stream within the block, so that the caller has the engines to itself."""
        with self._changed:
            self._state.pauses += 1
            self._interrupt_all()
            self._changed.wait_for(lambda: all(engine.is_idle for engine in self._engines))
        try:
            yield
        finally:
            with self._changed:
                self._state.pauses -= 1
                self._changed.notify_all()

    def _deal(self) -> None:
        """Reassign groups after engines have joined or left."""
        with self._changed:
            self._state.deal(self._serving())
            for engine in self._engines:
                engine.interrupt_if_moved()
            self._changed.notify_all()

    def _serving(self) -> list[int]:
        members = self._run.fleet.membership.members
        return [number for number, engine in enumerate(self._run.fleet.rollout) if engine in members]

    def _interrupt_all(self) -> None:
        for engine in self._engines:
            engine.interrupt()
        self._changed.notify_all()
