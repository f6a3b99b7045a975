"""A run on a cluster that its drivers join."""

import pytest

from tests.chaos.runs import Disturbed


@pytest.fixture
def joined(disturbed: Disturbed, monkeypatch: pytest.MonkeyPatch) -> Disturbed:
    """To be told by `join` which cluster."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a token would have to be in the home folder
    return disturbed
