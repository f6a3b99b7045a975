"""Capture of agents that call an HTTP endpoint: their requests become trajectories."""
