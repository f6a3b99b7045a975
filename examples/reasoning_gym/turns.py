"""After a wrong answer the model gets a message and answers again; a later right answer is worth less.

For rows of the data source `reasoning_gym`, of any generator; the generator's own scorer scores answers.
"""

from dataclasses import replace
from typing import Any

import cairn
from cairn.tasks.rewards.reasoning_gym import grade

TURNS = 3
"""Answers at most."""
DISCOUNT = 0.5
"""Factor on the reward of a right answer for each turn before it."""
WRONG = "That is wrong. Try again."


async def generate(ctx: cairn.Context, sample: cairn.SampleRequest) -> cairn.Trajectory:
    """Up to `TURNS` answers, until one is right, or is cut off before it ends."""
    segments: list[cairn.Segment] = []
    ids = list(sample.prompt_ids)
    correction = cairn.Segment.given(next_turn(ctx.tokenizer, WRONG))
    while True:
        answer = await ctx.sample(ids)
        segments.append(answer)
        text = ctx.tokenizer.decode(answer.ids, skip_special_tokens=True)
        right = await ctx.judge("reasoning_gym", text) == 1
        if right or answer.finish_reason != "stop" or len(segments) == 2 * TURNS - 1:
            return cairn.Trajectory(segments)
        segments.append(correction)
        ids += [*answer.ids.tolist(), *correction.ids.tolist()]


def reward(sample: cairn.Sample) -> dict[str, Any]:
    """The score of the last answer, halved for every answer before it; how many there were, and whether it is right."""
    answers = [segment for segment in sample.segments if segment.sampled] or [None]
    last = sample if answers[-1] is None else replace(sample, response=plain(answers[-1].text), segments=())
    found = grade(last)
    return {
        "reward": found["reward"] * DISCOUNT ** (len(answers) - 1),
        "right": found["right"],
        "answers": float(len(answers)),
    }


def next_turn(tokenizer: Any, message: str) -> list[int]:
    """Tokens of a message of the user and of the beginning of the model's answer, after an answer that has ended."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer.encode("\n" + text, add_special_tokens=False)
    return ids


def plain(text: str) -> str:
    """An answer without its end token."""
    return text.partition("<|im_end|>")[0]
