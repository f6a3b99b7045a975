"""Common parts of the tests of evaluations."""

import pytest

from cairn.engines.rollout.transformers.engine import TransformersEngine

BENCHMARK = """
name: digits
title: Digits
prompt: {style: chat, column: prompt}
columns: {label: label}
sampling: {n: 2, temperature: 1.0, max_tokens: 8}
grader: {name: exact_match}
"""


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that starts an engine of an evaluation's own."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(TransformersEngine, "__init__", refuse)
