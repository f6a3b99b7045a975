"""A single response to the prompt."""

from cairn.engines.agents.episodes.context import Context
from cairn.engines.types.trajectories import SampleRequest, Trajectory


async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
    """Call the policy once."""
    return Trajectory([await ctx.sample(sample.prompt_ids)])
