"""Repeat and compare committed steps: fork, replay, rescore, what-if, diff."""
