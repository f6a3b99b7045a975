"""Rollout engines, each in a folder of its own, and what they have in common."""
