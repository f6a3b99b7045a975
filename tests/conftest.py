import os

from hypothesis import settings

# Ray's workers give way to every other process by default: a test beside them would starve them.
os.environ.setdefault("RAY_worker_niceness", "0")

# A busy machine is slow, and that is no failure.
settings.register_profile("cairn", deadline=None)
settings.load_profile("cairn")

pytest_plugins = ["tests.s3", "tests.tiny_run", "tests.ray_fixtures", "tests.sglang_server"]
