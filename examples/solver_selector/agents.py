"""One policy in two roles: solvers answer a question concurrently, and a selector reads their answers and picks one.

Each solver gets the reward of its own answer, the selector that of the answer it picked. Each is compared with others
of its role.
For rows of the data source `reasoning_gym`, whose scorer scores answers.
"""

import asyncio
from collections.abc import Sequence

import cairn

SOLVERS = 3
"""Answers to a question."""


async def generate(ctx: cairn.Context, sample: cairn.SampleRequest) -> list[cairn.Trajectory]:
    """The solvers' trajectories, and the selector's: after a prompt of its own, and last, so that its reward is the
    sample's."""
    answers = await asyncio.gather(*(ctx.sample(sample.prompt_ids) for _ in range(SOLVERS)))
    texts = [ctx.tokenizer.decode(answer.ids, skip_special_tokens=True) for answer in answers]
    scores = await asyncio.gather(*(ctx.judge("reasoning_gym", text) for text in texts))
    chat = [{"role": "user", "content": choice(question(sample.prompt), texts)}]
    ids = ctx.tokenizer.encode(
        ctx.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True), add_special_tokens=False
    )
    pick = await ctx.sample(ids, max_new_tokens=2)
    number = ctx.tokenizer.decode(pick.ids, skip_special_tokens=True)
    return [
        *(
            cairn.Trajectory([answer], reward=score, role="solver")
            for answer, score in zip(answers, scores, strict=True)
        ),
        cairn.Trajectory([pick], prompt_ids=ids, reward=worth(number, scores), role="selector"),
    ]


def choice(question_text: str, answers: Sequence[str]) -> str:
    """Return the prompt of the selector."""
    listed = "".join(f"\n{number}:\n{answer}" for number, answer in enumerate(answers, 1))
    return f"{question_text}{listed}\nWhich?"


def worth(number: str, scores: Sequence[float]) -> float:
    """The score of the answer that was picked; 0 where none was."""
    return dict(zip(map(str, range(1, SOLVERS + 1)), scores, strict=True)).get(number, 0.0)


def question(prompt: str) -> str:
    """Return the user's question in the chat's text."""
    return prompt.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
