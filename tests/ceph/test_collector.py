"""`tests.storage.upkeep.test_collector` on Ceph."""

from tests.storage.upkeep.test_collector import *  # noqa: F403
