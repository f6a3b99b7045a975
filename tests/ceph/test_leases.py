"""`tests.storage.test_leases` on Ceph."""

from tests.storage.test_leases import *  # noqa: F403
