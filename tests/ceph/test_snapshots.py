"""`tests.storage.test_snapshots` on Ceph."""

from tests.storage.test_snapshots import *  # noqa: F403
