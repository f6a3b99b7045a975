"""A Ray cluster that several runs of this machine share. The cluster ends with the process that started it.

    python -P -m cairn.engines.fleet.head PARENT_PID CPUS        prints its address when it is up

This is the cluster that a driver starts for itself (`cairn.engines.fleet.cluster`), but in a process of its own, so
that runs can come and go on it. SIGTERM ends it, and so does the end of its parent.
"""

import argparse
import os
import signal
import threading

import ray

from cairn.engines.fleet.cluster import Cluster, require_cluster
from cairn.engines.fleet.fleet import LEAST_OBJECT_STORE
from cairn.engines.types.errors import EngineError
from cairn.storage.store.errors import NoSpace

START_TIMEOUT = 180.0
"""Seconds for each of the two attempts to start the cluster."""

LOST = 3
"""Exit code where the cluster has died."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="cairn.engines.fleet.head")
    parser.add_argument("parent", type=int, help="id of the process with which the cluster ends")
    parser.add_argument("cpus", type=int, help="CPUs that runs can reserve")
    arguments = parser.parse_args()
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda signum, frame: terminated.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        cluster = Cluster.open(
            None, num_cpus=arguments.cpus, object_store_memory=2 * LEAST_OBJECT_STORE, timeout=START_TIMEOUT
        )
    except (EngineError, NoSpace) as error:
        raise SystemExit(str(error)) from None
    signal.signal(signal.SIGTERM, lambda signum, frame: terminated.set())  # Ray has put its own there
    print(ray.get_runtime_context().gcs_address, flush=True)
    try:
        while not terminated.wait(0.5) and os.getppid() == arguments.parent:
            require_cluster()
    except EngineError as error:
        raise SystemExit(str(error)) from None
    finally:
        cluster.close()


if __name__ == "__main__":
    main()
