"""Pages and progress in Prefect's interface."""
