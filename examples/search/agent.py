"""The agent: the model searches, reads the result and answers. Also the reward of an answer."""

import re

import cairn

TURNS = 4
"""Answers of the model at most: it may search three times."""


async def generate(ctx: cairn.Context, sample: cairn.SampleRequest) -> cairn.Trajectory:
    """Its turns, and what is found in between."""
    ids, segments = [*sample.prompt_ids], []
    while True:
        said = await ctx.sample(ids)
        segments.append(said)
        asked = re.search(r"<search> (.*?) </search>", ctx.tokenizer.decode(said.ids))
        if asked is None or len(segments) >= 2 * TURNS - 1:
            return cairn.Trajectory(segments)
        found = await ctx.call("search", {"query": asked[1]})
        turn = f"\n<|im_start|>tool\n{found}<|im_end|>\n<|im_start|>assistant\n"
        given = cairn.Segment.given(ctx.tokenizer.encode(turn, add_special_tokens=False))
        segments.append(given)
        ids += [*said.ids, *given.ids]


def grade(sample: cairn.Sample) -> float:
    """1 if the last answer is the label."""
    return float(re.findall(r"<answer> (.*?) </answer>", sample.response)[-1:] == [sample.label])
