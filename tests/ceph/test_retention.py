"""`tests.storage.upkeep.test_retention` on Ceph."""

from tests.storage.upkeep.test_retention import *  # noqa: F403
