"""The main program of the process beside the driver, in which the bodies of steps run: `cairn.tasks.durable.beside`.

A body gets a run that has the ledger to read, and of the driver's run only the grader, by questions. Everything else
that a live run has raises an error.
"""

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache, cached_property, partial
from typing import Any

from cairn.configs.kinds import user_code
from cairn.engines.models.tokenizers import load_tokenizer, stop_clock
from cairn.engines.types.errors import EngineError
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.snapshots import Attempt
from cairn.storage.opening import open_store
from cairn.tasks.durable.beside import Question, serve
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.plugin_sources import require_recorded
from cairn.tasks.durable.step import GraderTerms, Outcome, StepCall, StepRequest
from cairn.tasks.rewards.grader import GRADER_OPTIONS, Graded
from cairn.tasks.rewards.sample import Sample
from cairn.tasks.steps import steps_of

MODULE = "cairn.tasks.step_process"
CACHE_BYTES = 1 << 30
"""Instead of `cairn.tasks.durable.recorded_run.TABLE_CACHE_BYTES`: files of an iteration are read by several steps."""

TEXT_AT_A_TIME, TEXT_OF_A_QUESTION = 1 << 25, 1 << 22
"""Characters of responses that the driver grades at a time, and of one question to it. They bound its memory."""


class Room:
    """Room for some amounts at a time. An amount that is larger than all of it has it alone. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        self._changed = threading.Condition()

    @contextmanager
    def holding(self, amount: int) -> Iterator[None]:
        """Wait until there is room for the amount, and hold it inside the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + amount <= self._most)
            self._held += amount
        try:
            yield
        finally:
            with self._changed:
                self._held -= amount
                self._changed.notify_all()


_ROOM = Room(TEXT_AT_A_TIME)


class DriversGrader:
    """A grader in the driver, as `cairn.tasks.rewards.grader.Grading`."""

    sees_messages = False

    def __init__(self, terms: GraderTerms, batch: int, ask: Question) -> None:
        """`batch`: samples that a call of the grader gets, if it takes several."""
        self.name, self.version = terms.name, terms.version
        self.sees_whole_samples, self.sees_tokens = terms.sees_whole_samples, terms.sees_tokens
        self.by_group = terms.by_group
        self._batch, self._ask = batch, ask

    def grade(self, samples: Sequence[Sample], groups: Sequence[Hashable] | None = None) -> list[Graded]:
        """Grade a batch: see `Grading.grade`."""
        graded: list[Graded] = []
        sizes = [len(sample.response) for sample in samples]
        for part in self._questions(sizes, groups):
            with _ROOM.holding(sum(sizes[part])):
                graded += self._ask((samples[part], None if groups is None else groups[part]))
        return graded

    def _questions(self, sizes: Sequence[int], groups: Sequence[Hashable] | None) -> Iterator[slice]:
        """Yield the samples of each question. They do not divide what one call of the grader gets."""
        last = {group: i for i, group in enumerate(groups)} if self.by_group and groups is not None else None
        start, text, whole = 0, 0, -1
        for i, size in enumerate(sizes):
            may_end = whole < i if last is not None else i % self._batch == 0
            if i > start and may_end and text + size > TEXT_OF_A_QUESTION:
                yield slice(start, i)
                start, text = i, 0
            text += size
            if last is not None and groups is not None:
                whole = max(whole, last[groups[i]])
        if sizes:
            yield slice(start, len(sizes))

    def close(self) -> None:
        """Do nothing: the driver closes its grader."""


class LazyTokenizer:
    """The tokenizer, which is loaded when a grader needs it."""

    def __init__(self, folder: str, created_at: float) -> None:
        self._folder, self._created_at = folder, created_at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)

    @cached_property
    def _loaded(self) -> Any:
        tokenizer = load_tokenizer(self._folder)
        stop_clock(tokenizer, self._created_at)
        return tokenizer


def main(connection: int, parent: int, interval: float) -> None:
    """Serve the driver `parent` over a connection until it ends, with a sign of life every `interval` seconds."""
    serve(connection, parent, partial(_run, {}), interval)


def _run(opened: dict[tuple[str, str], RunContext], request: StepRequest, ask: Question) -> Outcome:
    """Execute a step's body and write its files. `opened`: runs that requests have read before."""
    key = request.store_url, request.run
    if key not in opened:
        opened[key] = _open(request)
    run = copy(opened[key])
    run.config = request.config
    run.graders = {None: DriversGrader(request.grader, request.config.reward.rm_batch_size, ask)}
    step = steps_of(request.config)[request.step]
    for option, paths in user_code(request.config).items():
        if option in request.sources and option not in GRADER_OPTIONS:
            _load(tuple(paths), request.sources[option])
    attempt = Attempt(run.ledger.store, request.run, request.iteration, request.step, request.shard, request.attempt)
    call = StepCall(run, request.iteration, request.shard, attempt, request.input_digest, request.earlier_digests)
    return step.perform(call, *request.args, **request.kwargs)


@cache  # what is loaded stays as it is
def _load(paths: tuple[str, ...], recorded: str) -> None:
    """Load user code, which may have been changed since the driver loaded it. Raises BadPlugin then."""
    require_recorded(paths, recorded)


def _open(request: StepRequest) -> RunContext:
    return RunContext(
        request.config,
        Ledger.open(open_store(request.store_url), request.run),
        fleet=_no_fleet,
        tokenizer=LazyTokenizer(request.config.model.path, request.created_at),
        data=None,  # type: ignore[arg-type]
        max_prompt_len=0,
        benchmarks={},
        graders={},
        environment=request.environment,
        emit=lambda event: None,
        cache_bytes=CACHE_BYTES,
    )


def _no_fleet() -> Any:
    raise EngineError("a step beside the driver has no engines")
