"""Struck in the middle of rollouts by real SGLang servers behind a router, a run keeps what has finished and goes on.

SGLang's samples depend on their company, so a struck run does not end in the bits of one that was left alone. What is
committed holds bit for bit all the same: every step after a rollout, done again from its samples, gives the same.
"""

import json
from pathlib import Path

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.storage.ledger.commits import Step
from tests.chaos.matrix import Driver, Plan, case, execute
from tests.chaos.oracle import differences
from tests.chaos.runs import Disturbed, chaos_config

GROUPS = 8
ITERATIONS = 2

STRUCK = Plan(
    "sglang",
    (
        Driver((case(0, Step.ROLLOUT, "halfway", "stopped"), case(0, Step.TRAIN, "during", "driver"))),
        Driver((case(1, Step.ROLLOUT, "halfway", "router"),)),
    ),
)
"""Servers and engines are killed in tests/engines/fleet/test_sglang_fleet.py, and in runs by `make chaos`."""


@pytest.fixture
def sglang_config_file(tiny_assets: Path, tmp_path: Path) -> Path:
    """The chaos configuration with two servers behind a router, whose groups finish one after the other."""
    config = chaos_config(tiny_assets).model_dump(mode="json")
    config["rollout"] |= {
        "engine": "sglang",
        "num_rollout": ITERATIONS,
        "rollout_batch_size": GROUPS,
        "rollout_max_response_len": 48,
        "max_running_requests": 4,
        "sglang": {"max_total_tokens": 4096},
        "router": {"policy": "round_robin"},
        "rollout_health_check_interval": 1,
        "rollout_health_check_timeout": 10,
    }
    config["fleet"] |= {"call_timeout": 60}
    file = tmp_path / "sglang.json"
    file.write_text(RunConfig.model_validate(config).model_dump_json())
    return file


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_stopped_and_a_router_killed_in_mid_rollout_cost_nothing_that_had_finished(
    sglang_config_file: Path, tmp_path: Path, api_url: str
) -> None:
    run = Disturbed(tmp_path, sglang_config_file, {"PREFECT_API_URL": api_url})
    assert execute(STRUCK, run) == []
    assert not run.left_behind()

    commits = run.commits()
    assert differences(run, None) == []
    assert len(run.state_digests()) == ITERATIONS

    # Of every group as many samples as asked; what had finished was asked for once: see `differences`.
    for commit in commits:
        if commit.step is Step.ROLLOUT:
            assert commit.metrics["recovered_groups"] + commit.metrics["generated_groups"] == GROUPS / 2
    notes = [json.loads(line) for line in (tmp_path / "generated.jsonl").open()]
    kinds = [next(word for word in ("asked", "finished") if word in note) for note in notes if note["iteration"] == 1]
    last_request = len(kinds) - kinds[::-1].index("asked")
    assert "finished" in kinds[:last_request], "its rollouts broke off with the router, after a sample had finished"
