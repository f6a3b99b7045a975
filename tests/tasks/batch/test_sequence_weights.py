"""A run by an estimator that names its loss, with weights that are normalised over the optimizer step."""

from pathlib import Path

import pytest

from cairn.flows.driver.validation import setup_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.steps import stale_steps
from tests.tiny_run import DirectSteps, tiny_config, tiny_context


def test_a_run_scores_what_its_mean_weight_is_made_from_and_reads_what_it_has_declared(
    tiny_assets: Path, tmp_path: Path
) -> None:
    algorithm = {
        "advantage_estimator": "gspo",
        "use_rollout_logprobs": False,
        "use_tis": True,
        "custom_tis_function_path": "mis",
        "tis_level": "sequence",
        "tis_batch_normalize": True,
        "use_rs": True,
        "rs_upper_bound": 1.5,
        "rs_veto_threshold": 1e-4,
        "get_mismatch_metrics": True,
    }
    config = tiny_config(tiny_assets, algorithm=algorithm)
    assert setup_problems(config) == []
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        assert run.committed(0, Step.SCORE).metrics.keys() == {"log_probs"}
        metrics = run.committed(0, Step.TRAIN).metrics
        assert metrics["tis_batch_norm"] == pytest.approx(metrics["tis"], rel=1e-3)
        assert metrics["mis_ppl_ratio"] == pytest.approx(1, abs=1e-3)
        assert (metrics["rs_rejected"], metrics["rs_vetoed"], metrics["pg_clipfrac"]) == (0, 0, 0)
        assert metrics["grad_norm"] > 0
        changed = tiny_config(tiny_assets, algorithm={**algorithm, "rs_upper_bound": 2.0})
        assert {step for _, step, _, _ in stale_steps(run.ledger, changed, {})} >= {"train", "sync"}
