"""Each row is a task of the environment: `python -m examples.verifiers.build` writes them."""

import sys
from pathlib import Path

import cairn

sys.path.append(str(Path(__file__).parent))  # a published environment is an installed package

ENV = {"taskset": {"id": "higher_or_lower"}, "agent": {"timeout": {"rollout": 120.0}}}


async def generate(ctx: cairn.Context, sample: cairn.SampleRequest) -> list[cairn.Trajectory]:
    """An episode of the environment."""
    return await cairn.verifiers(ctx, sample, ENV, index=sample.metadata["index"])
