"""`tests.storage.test_retention` on Ceph."""

from tests.storage.test_retention import *  # noqa: F403
