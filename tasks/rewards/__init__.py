"""Graders, one a file, found by name."""
