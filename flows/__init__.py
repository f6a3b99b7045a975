"""Prefect flows, and everything that a person runs or reads: the driver, the command line, pages."""

import os

# Read when Prefect is imported; else it reports the first use in a terminal to its makers, and says so there.
os.environ.setdefault("DO_NOT_TRACK", "1")
