"""Deployments: what Prefect's interface offers to start, the forms of it, and the process that serves them."""
