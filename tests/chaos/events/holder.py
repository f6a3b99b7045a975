"""A driver that does nothing but hold a run's lease: `python -m tests.chaos.events.holder STORE RUN TIME_TO_LIVE`.

Answers each line of its standard input with what looking at its lease gives, and ends with it.
"""

import sys

from cairn.storage.ledger.leases import Lease, Outcome
from cairn.storage.opening import open_store
from cairn.storage.store.errors import LeaseHeld, LeaseLost, StoreError


def main(store_url: str, run: str, time_to_live: float) -> None:
    try:
        lease = Lease.acquire(open_store(store_url), run, time_to_live=time_to_live, renewal_interval=time_to_live / 6)
    except LeaseHeld as error:
        print(f"refused: {error}", flush=True)
        return
    print(f"holds epoch {lease.epoch}", flush=True)
    for _ in sys.stdin:
        try:
            lease.check()
            print("holds it", flush=True)
        except (LeaseLost, StoreError) as error:
            print(f"lost: {error}", flush=True)
    lease.release(Outcome.STOPPED)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
