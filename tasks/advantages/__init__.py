"""Compute advantages from rewards: the step, and one estimator a file."""
