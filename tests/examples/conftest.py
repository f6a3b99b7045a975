from pathlib import Path

import pytest

from examples.quickstart import build as builder


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """A folder to stand in, with what `make tiny` builds but for a warm start of twenty steps instead of 300."""
    folder: Path = tmp_path_factory.mktemp("root")
    assert builder.build(folder / builder.FOLDER, steps=20)
    return folder
