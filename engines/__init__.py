"""Engines: what generates and what trains, and the fleet that holds them."""

import os

# Before Ray is imported, which reads it then. Ray prints what it has to say about a dead actor to the driver's standard
# output, even where no output of actors is forwarded; the fleet raises it, and that output belongs to the command.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")

# Before MKL's first product, which reads it then. Otherwise MKL chooses its kernel by the number of rows, and on some
# processors a row's last bits depend on it: with this, samples do not depend on what else is in their batch.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
