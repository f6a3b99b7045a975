"""Losses, one a file, found by name."""
