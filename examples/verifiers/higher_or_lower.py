"""Guess a number: an environment of `verifiers`, which imports nothing of Cairn.

Its taskset has the numbers. Its environment replies to each guess whether the number is higher or lower. Its reward
falls with the number of guesses.
"""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["HigherOrLowerEnv", "HigherOrLowerTaskset"]

GUESSES = 3
"""At most."""


def guess_of(reply: str | None) -> int | None:
    """The number that a reply ends with."""
    found = re.findall(r"\d+", reply or "")
    return int(found[-1][:9]) if found else None


class HigherOrLowerConfig(vf.TasksetConfig):
    highest: int = 9
    size: int = 1000
    seed: int = 0


class HigherOrLowerData(vf.TaskData):
    number: int


class HigherOrLowerTask(vf.Task[HigherOrLowerData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        """1 for the first guess, half for the second, and so on; 0 where it was not found."""
        guesses = [guess_of(message.content) for message in trace.assistant_messages]
        return 1.0 / len(guesses) if guesses and guesses[-1] == self.data.number else 0.0

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class HigherOrLowerTaskset(vf.Taskset[HigherOrLowerTask, HigherOrLowerConfig]):
    def load(self) -> Iterator[HigherOrLowerTask]:
        draw = random.Random(self.config.seed)
        for index in range(self.config.size):
            number = draw.randint(0, self.config.highest)
            prompt = f"Guess my number from 0 to {self.config.highest}."
            yield HigherOrLowerTask(HigherOrLowerData(idx=index, prompt=prompt, number=number), self.config.task)


class HigherOrLowerEnv(vf.SingleAgentEnv):
    async def run(self, task: HigherOrLowerTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(GUESSES - 1):
                guess = guess_of(segment.last_reply)
                if segment.terminated or guess == task.data.number:
                    return
                hint = "That is no number." if guess is None else "Higher." if guess < task.data.number else "Lower."
                segment = await interaction.turn(hint)
