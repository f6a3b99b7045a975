"""The agent: the model calls the calculator, reads the result and answers. Also the reward of an answer."""

import re

import cairn

TURNS = 3
"""Maximum of answers of the model: it may call twice."""


async def generate(ctx: cairn.Context, sample: cairn.SampleRequest) -> cairn.Trajectory:
    """Return the model's turns, and the calculator's results between them."""
    ids, segments = [*sample.prompt_ids], []
    while True:
        reply = await ctx.sample(ids)
        segments.append(reply)
        call = re.search(r"<call>(.*?)</call>", ctx.tokenizer.decode(reply.ids))
        if call is None or len(segments) >= 2 * TURNS - 1:
            return cairn.Trajectory(segments)
        try:
            result = await ctx.call("calculator", {"expression": call[1]})
        except cairn.ToolFailed:
            result = "error"
        turn = f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"
        result_turn = cairn.Segment.given(ctx.tokenizer.encode(turn, add_special_tokens=False))
        segments.append(result_turn)
        ids += [*reply.ids, *result_turn.ids]


def grade(sample: cairn.Sample) -> float:
    """Return 1 if the label is in the last box. The calculator writes no box, so it does not answer by itself."""
    return float(re.findall(r"\\boxed\{(.*?)\}", sample.response)[-1:] == [sample.label])
