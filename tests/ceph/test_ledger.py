"""`tests.storage.test_ledger` on Ceph."""

from tests.storage.test_ledger import *  # noqa: F403
