"""What a step that fails leaves in the store: nothing but finished groups, which the next attempt takes over."""

from pathlib import Path
from typing import Any

import pytest

from cairn.engines.types.errors import EngineDied
from cairn.flows.iteration import iteration
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.store.errors import NoSpace, StoreError
from tests.local_fleet import LocalFleet
from tests.tiny_run import DirectSteps, tiny_config, tiny_context


@pytest.mark.parametrize(
    ("error", "stays"), [(NoSpace("full"), False), (EngineDied("gone"), False), (StoreError("no answer"), True)]
)
def test_a_checkpoint_that_breaks_off_is_removed_unless_the_store_is_out_of_reach(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, stays: bool
) -> None:
    config = tiny_config(tiny_assets, rollout={"num_rollout": 1, "rollout_max_response_len": 4})
    fleet = LocalFleet(config)
    write = fleet.training.write_copy

    def break_off(*args: Any) -> None:
        write(*args)
        raise error

    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        folder = layout.attempts(run.ledger.run, 0, Step.CHECKPOINT)
        with monkeypatch.context() as patch:
            patch.setattr(fleet.training, "write_copy", break_off)
            for _ in range(2):
                with pytest.raises(type(error)):
                    iteration(run, DirectSteps(run), 0)
        assert bool(run.ledger.store.list(folder)) == stays
        iteration(run, DirectSteps(run), 0)
        (checkpoint,) = (commit for commit in run.ledger.commits(0) if commit.step is Step.CHECKPOINT)
        assert all(run.ledger.store.exists(layout.in_run(run.ledger.run, out.path)) for out in checkpoint.outputs)
