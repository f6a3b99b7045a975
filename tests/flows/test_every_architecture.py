"""The durable run of every architecture: two iterations, between which the trainer is lost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.trainer.stored_weights import read_weights
from tests.architectures import ARCHITECTURES, Architecture
from tests.local_fleet import LocalFleet
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

VOCABULARY = 384
"""Of the tiny run's tokenizer."""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
def test_a_run_goes_on_from_its_checkpoint_with_weights_that_every_engine_agrees_on(
    architecture: Architecture, tiny_assets: Path, tmp_path: Path
) -> None:
    model = replace(architecture, config={**architecture.config, "vocab_size": VOCABULARY}).save(tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / file).write_bytes((tiny_assets / "model" / file).read_bytes())
    small: dict[str, Any] = {"num_rollout": 2, "rollout_batch_size": 2, "n_samples_per_prompt": 3}
    config = tiny_config(
        tiny_assets,
        model={"path": str(model)},
        rollout={**small, "rollout_max_response_len": 8},
        checkpoint={"save_interval": 1},
    )
    fleet = LocalFleet(config)
    with tiny_context(str(tmp_path / "store"), config, fleet=fleet) as (run, _):
        iteration(run, DirectSteps(run), 0)
        fleet.training.restart()
        iteration(run, DirectSteps(run), 1)
        engine = fleet.rollout[0].engine
        assert [run.committed(index, Step.TRAIN).weight_version_out for index in (0, 1)] == [1, 2]
        assert engine.get_weight_version() == 1
        # The checkpoint was restored, and its state digest was that of the train step.
        assert engine.weights_checksum() == run.committed(0, Step.SYNC).values["digest"]
        for index in (0, 1):
            read_weights(run.ledger, run.committed(index, Step.SYNC))  # compares the digest
