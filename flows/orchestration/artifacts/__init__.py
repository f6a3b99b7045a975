"""Pages and progress bars in Prefect's UI."""
