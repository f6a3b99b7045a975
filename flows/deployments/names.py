"""Names of the deployments, without imports."""

DEPLOYMENT = "cairn"
"""Name of every deployment, after its flow: `train/cairn`."""

NAMES = ("train", "resume", "evaluate", "fork", "verify", "gc", "rescore")
"""Names of the deployed flows, defined in `cairn.flows.deployments.flows`."""
