"""`tests.storage.upkeep.test_deletion` on Ceph."""

from tests.storage.upkeep.test_deletion import *  # noqa: F403
