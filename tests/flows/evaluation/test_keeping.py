"""Weights that a driver would retire stay while an evaluation copies them."""

from pathlib import Path
from typing import Any

import pytest

from cairn.flows.evaluation.models import WHY, models_of, temporary_pin
from cairn.flows.export import model as exporting
from cairn.flows.iteration import iteration
from cairn.storage.ledger.decisions import pinned
from cairn.storage.upkeep.retention import pin, retire
from tests.tiny_run import DirectSteps, tiny_config, tiny_context


def test_an_iteration_is_pinned_as_long_as_anybody_copies_its_weights_and_a_persons_pin_stays(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiny_assets, checkpoint={"save_interval": 1, "save_retain_interval": 100})
    read, reasons = exporting._from_stored, list[str | None]()
    with tiny_context(str(tmp_path), config) as (run, _):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
        ledger = run.ledger

        def while_it_retires(*args: Any) -> None:
            assert retire(ledger, config.checkpoint, everything=True) == []
            reasons.append(pinned(ledger.decisions.all())[0].why)
            read(*args)

        monkeypatch.setattr(exporting, "_from_stored", while_it_retires)
        (model,) = models_of(ledger.store, "tiny@0")
        assert Path(model.folder(), "model.safetensors").is_file()
        model.close()
        assert (reasons, pinned(ledger.decisions.all())) == ([WHY], {})

        for ends_first in (0, 1):
            copies = [temporary_pin(ledger, 0), temporary_pin(ledger, 0)]
            for copy in copies:
                copy.__enter__()
            copies[ends_first].__exit__(None, None, None)
            assert list(pinned(ledger.decisions.all())) == [0], "the other one still copies"
            copies[1 - ends_first].__exit__(None, None, None)
            assert pinned(ledger.decisions.all()) == {}

        pin(ledger, 0, why="shipped")
        model.folder()
        model.close()
        assert (reasons, list(pinned(ledger.decisions.all()))) == ([WHY, "shipped"], [0])
        assert retire(ledger, config.checkpoint, everything=True) == []
