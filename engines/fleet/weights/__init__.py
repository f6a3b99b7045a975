"""Delivery of weights to rollout engines."""
