"""What makes an engine of requests one of samples: `generate` runs beside it, in its process where it is ours.

| what happens to the process of the user's function | what becomes of it |
|---|---|
| a sample keeps the others from their turn | it fails; the others go on from their records, in another process |
| it is ended from outside | all that have not ended go on from their records, in another process |
| the same, `LOSSES` times in a row without anything that was recorded or ended between | EngineDied |
| it ends by itself | GenerationFailed |
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from cairn.configs.kinds import GENERATE
from cairn.engines.episodes.asking import Asking
from cairn.engines.episodes.records import Recorded, take_records
from cairn.engines.episodes.runner import Generate, Runner
from cairn.engines.episodes.user_code import GenerateFunction, ProcessLost, SampleHung, UserCode
from cairn.engines.errors import EngineDied
from cairn.engines.rollout.streams import Stream
from cairn.engines.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types import SamplingParams

LOSSES = 4
"""Processes that may be ended from outside in a row."""


class SampleEngine:
    """Generates samples with a rollout engine. For one caller of `generate` at a time."""

    def __init__(self, open: Callable[[], Stream], abort: Callable[[], None]) -> None:
        """`open` and `abort` are the engine's."""
        self._open = open
        self._abort = abort
        self._user_code: UserCode | None = None
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
            yield from beside(stream, samples, params, GENERATE.load(function.name))

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
                yield [GeneratedSample.failed(left.pop(hung.key), str(hung))]
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


def beside(
    stream: Stream, samples: Sequence[SampleRequest], params: SamplingParams, function: Generate
) -> Iterator[list[GeneratedSample]]:
    """Generate samples by a function that waits for nothing but the engine, in this thread."""
    loop = asyncio.new_event_loop()
    runner = Runner(loop, function, params, _no_tokenizer)
    asking = Asking(stream)
    try:
        runner.begin(samples)
        while _settled(loop, runner).left or runner.ended:
            asked, runner.asked = runner.asked, []
            for id, answer in asking.submit(asked) or (asking.answers() if runner.left else ()):
                runner.answer(id, answer)
            runner.recorded()  # of which nobody makes anything
            _settled(loop, runner)
            ended, runner.ended = runner.ended, []
            yield ended
    finally:
        runner.close()


def _settled(loop: asyncio.AbstractEventLoop, runner: Runner) -> Runner:
    """Let the samples go on until all of them wait for the engine."""
    while runner.at_work:
        loop.call_soon(loop.stop)
        loop.run_forever()
    return runner


def _no_tokenizer() -> None:
    raise NotImplementedError("a function of ours works on tokens")
