"""Agents that speak to an HTTP endpoint, captured as trajectories."""
