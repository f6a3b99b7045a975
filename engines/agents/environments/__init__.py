"""Environments that others have made, by their own protocols."""
