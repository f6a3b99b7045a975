"""Deployments: the flows that Prefect's UI offers to start, their forms, and the process that serves them."""
