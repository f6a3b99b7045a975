"""A driver with a fleet, in a process of its own, that does what it is told on stdin: to be killed by tests.

    python -m tests.engines.fleet.fleet_driver MODEL ADDRESS DTYPE LEASE

ADDRESS is that of a cluster to join, or "none"; DTYPE is the rollout engine's; LEASE is a file with the newest epoch,
which this driver takes. It prints one line of JSON with where
its engines stand once they are up, and after each `train`; `hang` prints {} and trains with a stopped trainer; `close`
ends it.
"""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event

import numpy as np
import ray

from cairn.engines.fleet.fencing import Claim, Tenure
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.types.errors import ClusterLost
from cairn.engines.types.types import TrainBatch
from cairn.storage.store.errors import LeaseLost
from tests.fleets import sync, versions
from tests.ray_fixtures import fleet_config

BATCH = TrainBatch(
    input_ids=[np.arange(1 + i, 9 + i, dtype=np.int32) for i in range(4)],
    response_lengths=[5] * 4,
    loss_mask=[np.ones(5, np.uint8)] * 4,
    advantages=[np.full(5, i - 1.5, np.float32) for i in range(4)],
)


def report(fleet: Fleet) -> None:
    position = fleet.training.position()
    state = {
        "rollout": fleet.rollout[0].health()["pid"],
        "training": fleet.training.health()["pid"],
        "versions": versions(fleet),
        "weight_version": position.weight_version,
        "state_digest": position.state_digest,
        "last_input_digest": position.last_input_digest,
    }
    print(json.dumps(state), flush=True)


def acquire(lease: Path) -> Tenure:
    epoch = int(lease.read_text()) + 1 if lease.exists() else 1
    lease.write_text(str(epoch))

    def check() -> None:
        if int(lease.read_text()) != epoch:
            raise LeaseLost(f"epoch {lease.read_text()} is the newest")

    return Tenure(Claim("driver", epoch), check)


def close(fleet: Fleet) -> None:
    """While a thread asks, as a driver's does for drained machines, and later than that."""
    closed = Event()

    def ask() -> None:
        while not closed.is_set():
            fleet.seconds_until_drained()

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            fleet.close()
            with suppress(ClusterLost):
                fleet.rollout[0].abort()
        finally:
            closed.set()
    asking.result()
    assert not ray.is_initialized()


def main(model: str, address: str, dtype: str, lease: str) -> None:
    tenure = acquire(Path(lease))
    ray_address = None if address == "none" else address
    config = fleet_config(model, rollout={"dtype": dtype}, fleet={"ray_address": ray_address})
    with ThreadPoolExecutor(1) as pool:  # a thread that ends, as a flow's may: the cluster must not end with it
        fleet = pool.submit(Fleet.start, config, name="driver", total_steps=4, tenure=tenure).result()
    report(fleet)
    for command in sys.stdin:
        if command.strip() == "close":
            close(fleet)
            return
        try:
            if command.strip() == "hang":
                os.kill(fleet.training.health()["pid"], signal.SIGSTOP)
                print("{}", flush=True)
            version = fleet.training.position().weight_version
            fleet.training.train(BATCH, num_steps=1, expected_version=version, input_digest="trained")
            sync(fleet)
        except ClusterLost as error:
            print(f"ClusterLost: {error}")
            fleet.close()
            sys.exit(1)
        report(fleet)


if __name__ == "__main__":
    main(*sys.argv[1:])
