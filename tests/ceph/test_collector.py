"""`tests.storage.test_collector` on Ceph."""

from tests.storage.test_collector import *  # noqa: F403
