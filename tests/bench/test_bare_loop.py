"""What a durable run is measured against does the same work."""

import pytest

from bench import bare_loop
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("pipeline", ["sync", "lagged"])
def test_the_bare_loop_ends_in_the_same_bits_as_a_durable_run(pipeline, tiny_assets, tmp_path):
    benchmark = {"name": "heldout", "path": str(tiny_assets / "heldout.jsonl"), "max_response_len": 12}
    config = tiny_config(
        tiny_assets,
        rollout={"num_rollout": 4, "num_engines": 2, "pipeline": pipeline},
        eval={"eval_interval": 4, "benchmarks": [benchmark]},
    )
    with tiny_context(str(tmp_path), config) as (run, _):
        commits = [commit for index in range(4) for commit in iteration(run, DirectSteps(run), index)]
        (digest,) = train_digests(run, [3])
        scores = [run.read(commit)["reward"].to_numpy().mean() for commit in commits if commit.step == Step.EVAL]
    *_, outcome = bare_loop.run(config)
    assert outcome.state_digest == digest
    assert [outcome.score_before["heldout"], outcome.score_after["heldout"]] == pytest.approx(scores)
