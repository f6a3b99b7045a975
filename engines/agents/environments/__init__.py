"""Environments of other projects, through their own protocols."""
