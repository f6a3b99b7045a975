"""`tests.storage.store.test_store` on Ceph."""

from tests.storage.store.test_store import *  # noqa: F403
