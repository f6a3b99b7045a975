"""What makes an engine of requests one of samples: `generate` runs beside it, in its process where it is ours.

| what happens to the process of the user's function | what becomes of it |
|---|---|
| a sample keeps the others from their turn | it fails; the others go on from their records, in another process |
| it is ended from outside | all that have not ended go on from their records, in another process |
| the same, `LOSSES` times in a row without anything that was recorded or ended between | EngineDied |
| it ends by itself | GenerationFailed |
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from cairn.configs.kinds import GENERATE
from cairn.engines.agents.episodes.beside import Beside
from cairn.engines.agents.episodes.user_code import GenerateFunction, ProcessLost, SampleHung, UserCode
from cairn.engines.types.errors import EngineDied
from cairn.engines.types.trajectories import GeneratedSample, Recorded, SampleRequest, take_records
from cairn.engines.types.types import SamplingParams, Stream

LOSSES = 4
"""Processes that may be ended from outside in a row."""


class SampleEngine:
    """Generates samples with a rollout engine. For one caller of `generate` at a time."""

    def __init__(self, open: Callable[[], Stream], abort: Callable[[], None]) -> None:
        """`open` and `abort` are the engine's."""
        self._open = open
        self._abort = abort
        self._user_code: UserCode | None = None
        self._beside: Beside | None = None
        self._aborted = False

    def generate(
        self, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction
    ) -> Iterator[list[GeneratedSample] | Recorded]:
        """Generate samples; yield each as it ends. Whatever one of them asks joins what the engine is at work on. What
        they are given is yielded too, where the function records it: see `acknowledge`.

        Raises as streams do, but for requests that are refused: their samples fail. Raises BadTrajectory where what
        the function returned is none.
        """
        if function.records:
            yield from self._with_user_code(samples, params, function)
            return
        with closing(self._open()) as stream:
            self._beside = running = Beside(stream, params, GENERATE.load(function.name))
            yield from running.generate(samples)

    def join(self, samples: Sequence[SampleRequest]) -> bool:
        """Have the running `generate` generate these too, from any thread. False where it does not: there is none, it
        is about to end or was aborted, or samples run in a process of user code."""
        running = self._beside
        return running is not None and running.join(samples)

    def acknowledge(self, number: int) -> None:
        """What the running `generate` yielded with this number is durable, and all before it. From any thread."""
        if (user_code := self._user_code) is not None:
            user_code.acknowledge(number)

    def abort(self) -> None:
        """End the running `generate` soon, from any thread: it yields each unfinished sample as far as it came. Without
        a running one this does nothing."""
        self._aborted = True
        if (user_code := self._user_code) is not None:
            user_code.abort()
        self._abort()

    def give_up(self) -> None:
        """End the running `generate` of user code at once, from any thread, and its process: it raises."""
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
                    for told in self._process(function).generate(stream, list(left.values()), params):
                        losses = 0
                        if isinstance(told, Recorded):
                            take_records(left, told.records)
                        else:
                            for sample in told:
                                del left[sample.key]
                        yield told
                return
            except SampleHung as hung:
                if (hanging := left.pop(hung.key, None)) is not None:  # it has not failed already
                    yield [GeneratedSample.failed(hanging, str(hung))]
            except ProcessLost as lost:
                losses += 1
                if losses >= LOSSES:
                    raise EngineDied(f"{lost} {LOSSES} times in a row: has it memory enough?") from None
            if self._aborted:
                yield [GeneratedSample.aborted(sample) for sample in left.values()]
                return

    def _process(self, function: GenerateFunction) -> UserCode:
        """That of the last call, where it is of use."""
        if self._user_code is None or not self._user_code.can_generate(function):
            if self._user_code is not None:
                self._user_code.kill()
            self._user_code = UserCode(function)
        return self._user_code
