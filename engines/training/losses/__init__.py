"""Losses, one per file, selected by name."""
