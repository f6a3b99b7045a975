"""The response to the prompt, and nothing more."""

from cairn.engines.agents.episodes.context import Context
from cairn.engines.types.trajectories import SampleRequest, Trajectory


async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
    """One call of the policy."""
    return Trajectory([await ctx.sample(sample.prompt_ids)])
