"""Sandboxes for tests."""

from pathlib import Path

import pytest

from tests.debian import unpacked

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def bwrap() -> str:
    """A real one."""
    try:
        root = unpacked(["bubblewrap"], ROOT / "build" / "bubblewrap")
    except RuntimeError as error:
        pytest.skip(str(error))
    found = root / "usr/bin/bwrap"
    return str(found) if found.exists() else "bwrap"  # it is installed
