"""`tests.storage.upkeep.test_verification` on Ceph."""

from tests.storage.upkeep.test_verification import *  # noqa: F403
