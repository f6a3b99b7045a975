"""Whatever is struck, whenever, the run ends as if nothing had happened: the part of the matrix that is quick.

`make chaos` executes the whole matrix, and random kills after it.
"""

import json
from pathlib import Path

import pytest

from storage.commits import Step
from storage.ledger import Ledger
from storage.store import open_store
from tests.chaos.matrix import CI_SET, MOMENTS, STEPS, VICTIMS, execute, whole
from tests.chaos.runs import Disturbed, differences, recommitted
from tests.faulty_s3 import proxy_process
from tests.s3 import S3Server
from tests.storage.builders import commit_step


def test_the_quick_set_has_every_step_every_moment_and_every_victim() -> None:
    assert {fault.step for fault in CI_SET.faults} == set(STEPS)
    assert {fault.moment for fault in CI_SET.faults} == set(MOMENTS)
    assert {fault.victim for fault in CI_SET.faults} == set(VICTIMS)


def test_the_whole_matrix_has_every_case_once() -> None:
    cases = [(fault.step, fault.moment, fault.victim) for plan in whole() for fault in plan.faults]
    assert len(set(cases)) == len(cases) == len(STEPS) * len(MOMENTS) * len(VICTIMS)


@pytest.mark.timeout(900)
def test_a_run_struck_everywhere_ends_in_the_undisturbed_state(
    disturbed: Disturbed, undisturbed: Disturbed, s3_server: S3Server
) -> None:
    with proxy_process(s3_server.endpoint) as proxy:
        disturbed.store_url = f"s3://{s3_server.new_bucket()}/chaos"
        disturbed.environment = {**disturbed.environment, **s3_server.env, "AWS_ENDPOINT_URL": proxy.endpoint}
        assert execute(CI_SET, disturbed) == []
        assert proxy.control()["outage"] > 0
        with pytest.MonkeyPatch.context() as patch:
            for name, value in s3_server.env.items():
                patch.setenv(name, value)
            assert differences(disturbed, undisturbed) == []


def test_a_step_that_two_drivers_committed_is_found(tmp_path: Path) -> None:
    run = Disturbed(tmp_path, tmp_path / "config.json", {}, exits=[0])
    ledger = Ledger.create(open_store(run.store_url), "run", {})
    ledger.acquire()
    commit = commit_step(ledger, 0, Step.TRAIN)
    assert recommitted(run) == ["its drivers have noted no commits"]
    noted = tmp_path / "committed.jsonl"
    noted.write_text(json.dumps([commit.name, commit.digest]) + "\n")
    assert recommitted(run) == []
    noted.write_text(noted.read_text() + json.dumps([commit.name, "0" * 64]) + "\n")
    assert recommitted(run) == [
        "committed more than once: ['000000/train']",
        f"committed, and not so in the ledger: [('000000/train', '{'0' * 64}')]",
    ]
