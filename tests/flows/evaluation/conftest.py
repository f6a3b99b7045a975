"""Fixtures of evaluations."""

import pytest

from cairn.engines.rollout.transformers.engine import TransformersEngine


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that starts an engine of an evaluation's own."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(TransformersEngine, "__init__", refuse)
