"""The response to the prompt, and nothing more."""

from cairn.engines.episodes.context import Context
from cairn.engines.trajectories import SampleRequest, Trajectory


async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
    """One call of the policy."""
    return Trajectory([await ctx.sample(sample.prompt_ids)])
