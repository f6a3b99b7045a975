"""The agent: the model searches, reads the result and answers. Also the reward of an answer."""

import re

import cairn

TURNS = 4
"""Maximum of answers of the model: it may search three times."""


async def generate(ctx: cairn.Context, sample: cairn.SampleRequest) -> cairn.Trajectory:
    """Return the model's turns, and the search results between them."""
    ids, segments = [*sample.prompt_ids], []
    while True:
        reply = await ctx.sample(ids)
        segments.append(reply)
        query = re.search(r"<search> (.*?) </search>", ctx.tokenizer.decode(reply.ids))
        if query is None or len(segments) >= 2 * TURNS - 1:
            return cairn.Trajectory(segments)
        passages = await ctx.call("search", {"query": query[1]})
        turn = f"\n<|im_start|>tool\n{passages}<|im_end|>\n<|im_start|>assistant\n"
        result_turn = cairn.Segment.given(ctx.tokenizer.encode(turn, add_special_tokens=False))
        segments.append(result_turn)
        ids += [*reply.ids, *result_turn.ids]


def grade(sample: cairn.Sample) -> float:
    """Return 1 if the last answer is the label."""
    return float(re.findall(r"<answer> (.*?) </answer>", sample.response)[-1:] == [sample.label])
