r"""Products that a tiny model cannot compute, and a calculator that it may call: `python -m examples.calculator.build`.

    What is 37*48+5?   ->   <call>37*48+5</call>   ->   1781   ->   \boxed{1781}

Most demonstrations put the question itself into the box. Of those that call the calculator, most have another number in
the call than the question has. So a model that imitates them is right one time in sixteen. A hash decides which
questions are held out.

    build/calculator/
        demonstrations.jsonl   of the warm start: chats, some with calls of the calculator
        train.jsonl            questions and labels to learn from
        heldout.jsonl          others, for evaluation
        untrained/             the model before its warm start, and its tokenizer
        runs/warm-start/       the ledger of the warm start
        model/                 the warm-started model
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from examples.building import begin, build_by_command, write_rows
from examples.quickstart.task import is_held_out

FOLDER = Path("build/calculator")
TRAIN_ROWS, HELD_OUT_ROWS = 2048, 256

CALLS = 0.25
"""Share of the demonstrations that ask the calculator."""
WRONG_CALLS = 0.75
"""Share of these with another number in the call than the question has."""

STEPS = 250
"""Optimizer steps of the warm start."""


def main() -> None:
    """Command line."""
    build_by_command("the model and the data of the calculator", FOLDER, build)


def build(folder: Path, seed: int) -> None:
    """Write the folder."""
    from examples.quickstart.warm_start import BATCH, warm_start, write_model

    prepare(folder, seed, BATCH * STEPS)
    warm_start(folder, STEPS)
    write_model(folder)


def prepare(folder: Path, seed: int, shown: int) -> None:
    """Write the data, so many demonstrations among them, and the model before its warm start."""
    begin(folder, list(itertools.islice(demonstrations(random.Random(f"demonstrations/{seed}")), shown)), seed)
    for name, held_out, count in (("train", False, TRAIN_ROWS), ("heldout", True, HELD_OUT_ROWS)):
        chosen = itertools.islice(problems(random.Random(f"{name}/{seed}"), held_out=held_out), count)
        write_rows(folder / f"{name}.jsonl", ({"prompt": one.question, "label": str(one.value)} for one in chosen))


class Problem(NamedTuple):
    """a * b + c, or - c, all of two digits."""

    a: int
    b: int
    sign: str
    c: int

    @property
    def expression(self) -> str:
        """As the calculator takes it."""
        return f"{self.a}*{self.b}{self.sign}{self.c}"

    @property
    def question(self) -> str:
        """The prompt."""
        return f"What is {self.expression}?"

    @property
    def value(self) -> int:
        """The answer."""
        return self.a * self.b + (self.c if self.sign == "+" else -self.c)


def problems(rng: random.Random, *, held_out: bool) -> Iterator[Problem]:
    """Endless ones of one of the two sets."""
    while True:
        problem = Problem(rng.randint(10, 99), rng.randint(10, 99), rng.choice("+-"), rng.randint(10, 99))
        if is_held_out(problem.question) == held_out:
            yield problem


def demonstrations(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Questions, each with the chat that follows it."""
    for problem in problems(rng, held_out=False):
        turns = []
        answer = problem.expression
        if rng.random() < CALLS:
            computed = miscopied(problem, rng) if rng.random() < WRONG_CALLS else problem
            answer = str(computed.value)
            turns += [("assistant", f"<call>{computed.expression}</call>"), ("tool", answer)]
        turns.append(("assistant", f"\\boxed{{{answer}}}"))
        yield {
            "prompt": problem.question,
            "response": [{"role": role, "content": content} for role, content in turns],
        }


def miscopied(problem: Problem, rng: random.Random) -> Problem:
    """With another number in one of the three places."""
    place = rng.choice("abc")
    other = rng.choice([number for number in range(10, 100) if number != getattr(problem, place)])
    return problem._replace(**{place: other})


if __name__ == "__main__":
    main()
