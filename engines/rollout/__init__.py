"""Rollout engines, one a folder, and what they have in common."""
