"""Recomputation of advantages with another algorithm."""
