"""`tests.storage.test_verification` on Ceph."""

from tests.storage.test_verification import *  # noqa: F403
