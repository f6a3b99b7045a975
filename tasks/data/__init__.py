"""Prompts and demonstrations: their sources, and the order in which a run draws them."""
