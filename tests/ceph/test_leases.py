"""`tests.storage.ledger.test_leases` on Ceph."""

from tests.storage.ledger.test_leases import *  # noqa: F403
