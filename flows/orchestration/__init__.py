"""Prefect integration: the embedded server, the flow runs of a driver, and steps as tasks."""
