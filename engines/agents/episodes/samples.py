"""Generation of samples with an engine that serves requests.

Built-in generate functions run in the engine's process, a user's function in a process of its own:

| event of the process | result |
|---|---|
| a sample blocks the others | it fails; the others resume from their records, in another process |
| it is killed from outside | all unfinished samples resume from their records, in another process |
| the same, `LOSSES` times in a row without a record or a finished sample between | EngineDied |
| it exits by itself | GenerationFailed |
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing

from cairn.configs.kinds import GENERATE
from cairn.engines.agents.episodes.in_process import InProcessGeneration
from cairn.engines.agents.episodes.user_code import GenerateFunction, ProcessLost, SampleHung, UserCode
from cairn.engines.types.errors import EngineDied
from cairn.engines.types.trajectories import GeneratedSample, Recorded, SampleRequest, add_records
from cairn.engines.types.types import SamplingParams, Stream

LOSSES = 4
"""Processes in a row that are killed from outside until the engine counts as dead."""


Samples = Generator[list[GeneratedSample] | Recorded, None, None]


class SampleEngine:
    """Generates samples with a rollout engine, for one caller of `generate` at a time."""

    def __init__(self, open: Callable[[], Stream], abort: Callable[[], None]) -> None:
        """Store `open` and `abort`, the methods of the engine."""
        self._open = open
        self._abort = abort
        self._user_code: UserCode | None = None
        self._in_process: InProcessGeneration | None = None
        self._aborted = False

    def generate(self, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction) -> Samples:
        """Generate samples; yield each as it ends. Requests of all samples join the engine's running batch.

        Also yields the records of their calls, where the function records them: see `acknowledge`.

        Raises BadTrajectory where the function returns none, and the errors of streams except RequestRefused: a refused
        request fails its sample.
        """
        if function.records:
            yield from self._with_user_code(samples, params, function)
            return
        with closing(self._open()) as stream:
            self._in_process = running = InProcessGeneration(stream, params, GENERATE.load(function.name))
            yield from running.generate(samples)

    def join(self, samples: Sequence[SampleRequest]) -> bool:
        """Add samples to the running `generate`; thread-safe.

        Returns False where that is impossible: none is running, it is ending or aborted, or samples run in a process of
        user code.
        """
        running = self._in_process
        return running is not None and running.join(samples)

    def acknowledge(self, number: int) -> None:
        """Confirm that the records with this number, and all before them, are durable; thread-safe."""
        if (user_code := self._user_code) is not None:
            user_code.acknowledge(number)

    def abort(self) -> None:
        """End the running `generate` soon: it yields the partial result of each unfinished sample. Thread-safe.

        Does nothing where none is running.
        """
        self._aborted = True
        if (user_code := self._user_code) is not None:
            user_code.abort()
        self._abort()

    def give_up(self) -> None:
        """Kill the process of user code; the running `generate` raises. Thread-safe."""
        if (user_code := self._user_code) is not None:
            user_code.kill()

    def _with_user_code(
        self, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction
    ) -> Iterator[list[GeneratedSample] | Recorded]:
        left = {sample.key: sample for sample in samples}
        self._aborted = False
        losses = 0
        while True:
            try:
                with closing(self._open()) as stream:
                    for event in self._process(function).generate(stream, list(left.values()), params):
                        losses = 0
                        if isinstance(event, Recorded):
                            add_records(left, event.records)
                        else:
                            for sample in event:
                                del left[sample.key]
                        yield event
                return
            except SampleHung as hung:
                if (hanging := left.pop(hung.key, None)) is not None:  # it has not failed already
                    yield [GeneratedSample.failed(hanging, str(hung))]
            except ProcessLost as lost:
                losses += 1
                if losses >= LOSSES:
                    raise EngineDied(f"{lost} {LOSSES} times in a row: does it have enough memory?") from None
            if self._aborted:
                yield [GeneratedSample.aborted(sample) for sample in left.values()]
                return

    def _process(self, function: GenerateFunction) -> UserCode:
        """Return the process of the last call, where it can be reused, or a new one."""
        if self._user_code is None or not self._user_code.can_generate(function):
            if self._user_code is not None:
                self._user_code.kill()
            self._user_code = UserCode(function)
        return self._user_code
