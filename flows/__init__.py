"""Prefect flows, and everything that a person runs or reads: the driver, the command line, pages."""

import os

# Prefect reads this at import. Without it, Prefect sends telemetry on the first use in a terminal, and prints a notice.
os.environ.setdefault("DO_NOT_TRACK", "1")
