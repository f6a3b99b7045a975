"""Weights to evaluate."""

from pathlib import Path

import pytest

from cairn.flows.evaluation.models import BadPlace, models_of
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from tests.flows.written_runs import new_run, write_run


def test_an_iteration_that_was_not_published_is_refused_and_left_out_of_a_range(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path))
    write_run(ledger, 3)
    (tmp_path / layout.commit("toy", 1, Step.SYNC)).unlink()
    with pytest.raises(BadPlace, match="'toy@1' names no published iteration; the newest one of 'toy' is 2"):
        models_of(ledger.store, "toy@1")
    assert [one.origin["iteration"] for one in models_of(ledger.store, "toy@0:")] == [0, 2]
