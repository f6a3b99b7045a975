"""Engines: what generates and what trains, and the fleet that holds them."""

import os

# Before Ray is imported, which reads it then. Ray prints what it has to say about a dead actor to the driver's standard
# output, even where no output of actors is forwarded; the fleet raises it, and that output belongs to the command.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
