"""Names of the deployments, without imports."""

NAMES = ("train", "resume", "evaluate", "fork", "verify", "gc", "rescore")
"""Names of the deployed flows, defined in `cairn.flows.deployments.flows`, and of their deployments."""
