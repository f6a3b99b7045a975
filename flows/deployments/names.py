"""Names of the deployments; imports nothing."""

DEPLOYMENT = "cairn"
"""Of each: `train/cairn`."""

NAMES = ("train", "resume", "evaluate", "fork", "verify", "gc", "rescore")
"""Of their flows, in `cairn.flows.deployments.flows`."""
