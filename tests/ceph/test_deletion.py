"""`tests.storage.test_deletion` on Ceph."""

from tests.storage.test_deletion import *  # noqa: F403
