"""`tests.storage.ledger.test_snapshots` on Ceph."""

from tests.storage.ledger.test_snapshots import *  # noqa: F403
