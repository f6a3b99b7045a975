"""`tests.storage.test_store` on Ceph."""

from tests.storage.test_store import *  # noqa: F403
