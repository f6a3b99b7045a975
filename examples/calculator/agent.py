"""The agent: the model calls the calculator, reads the result and answers. Also the reward of an answer."""

import re

import cairn

TURNS = 3
"""Answers of the model at most: it may ask twice."""


async def generate(ctx: cairn.Context, sample: cairn.SampleRequest) -> cairn.Trajectory:
    """Its turns, and what the calculator says in between."""
    ids, segments = [*sample.prompt_ids], []
    while True:
        said = await ctx.sample(ids)
        segments.append(said)
        asked = re.search(r"<call>(.*?)</call>", ctx.tokenizer.decode(said.ids))
        if asked is None or len(segments) >= 2 * TURNS - 1:
            return cairn.Trajectory(segments)
        try:
            result = await ctx.call("calculator", {"expression": asked[1]})
        except cairn.ToolFailed:
            result = "error"
        turn = f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"
        given = cairn.Segment.given(ctx.tokenizer.encode(turn, add_special_tokens=False))
        segments.append(given)
        ids += [*said.ids, *given.ids]


def grade(sample: cairn.Sample) -> float:
    """1 if the label is in the last box. What the calculator says is in none, so it does not answer by itself."""
    return float(re.findall(r"\\boxed\{(.*?)\}", sample.response)[-1:] == [sample.label])
