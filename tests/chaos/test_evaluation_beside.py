"""An evaluation beside a live driver: of what that has published, on an engine of its own, while training goes on."""

from pathlib import Path

import pytest

from cairn.flows.evaluation.benchmarks import benchmarks_of
from cairn.flows.evaluation.evaluating import evaluate_models
from cairn.flows.evaluation.models import models_of
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from tests.chaos.runs import Disturbed
from tests.tiny_run import tiny_config
from tests.waiting import wait_for

BENCHMARK = """
name: digits
title: Digits
prompt: {style: chat, column: prompt}
columns: {label: label}
sampling: {n: 2, max_tokens: 8, temperature: 1.0}
grader: {name: exact_match}
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_live_driver_has_published_is_evaluated_while_it_trains_on(
    disturbed: Disturbed, tiny_assets: Path
) -> None:
    rollout = {"num_rollout": 12, "rollout_batch_size": 2, "n_samples_per_prompt": 4, "rollout_max_response_len": 8}
    config = tiny_config(tiny_assets, rollout=rollout, checkpoint={"save_interval": 1, "save_retain_interval": 100})
    disturbed.config_file = disturbed.folder / "config.json"
    disturbed.config_file.write_text(config.model_dump_json())
    file = disturbed.folder / "digits.yaml"
    file.write_text(BENCHMARK + f"source: {{data: {tiny_assets / 'heldout.jsonl'}}}\n")
    store = open_store(disturbed.store_url)

    def published() -> bool:
        try:
            return Ledger.open(store, disturbed.name).find(0, Step.SYNC) is not None
        except FileNotFoundError:
            return False

    driver = disturbed.start()
    wait_for(lambda: published() or driver.poll() is not None, 240)
    (model,) = models_of(store, f"{disturbed.name}@latest")
    (found,) = evaluate_models(store, [model], benchmarks_of([str(file)]))
    assert driver.poll() is None, disturbed.log()
    assert driver.wait(240) == 0, disturbed.log()

    result, ledger = found.result, disturbed.ledger()
    assert found.computed
    synced = ledger.find(int(str(result.origin["iteration"])), Step.SYNC)
    assert synced is not None
    assert result.key.weights == synced.values["digest"]
    meanwhile = [c for c in disturbed.commits() if result.started_at < c.committed_at < result.committed_at]
    assert {commit.epoch for commit in disturbed.commits()} == {1}
    assert meanwhile, "the driver committed nothing while the evaluation ran"
    assert len(disturbed.state_digests()) == 12
