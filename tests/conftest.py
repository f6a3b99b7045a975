pytest_plugins = ["tests.s3", "tests.tiny_run", "tests.ray_fixtures", "tests.sglang_server"]
