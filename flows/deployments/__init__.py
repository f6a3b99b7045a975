"""Deployments: the flows that Prefect's UI offers to start, their forms, and the process that serves them."""

NAMES = ("train", "resume", "evaluate", "fork", "verify", "gc", "rescore")
"""Names of the deployed flows, defined in `cairn.flows.deployments.flows`, and of their deployments."""
