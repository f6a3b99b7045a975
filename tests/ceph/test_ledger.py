"""`tests.storage.ledger.test_ledger` on Ceph."""

from tests.storage.ledger.test_ledger import *  # noqa: F403
