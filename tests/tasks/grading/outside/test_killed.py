"""A driver that is killed while it grades: what was answered is not paid for again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cairn.configs.schema.reward import RewardConfig
from cairn.storage.opening import open_store
from cairn.tasks.grading.opening import open_grader
from cairn.tasks.rewards.sample import Sample
from tests.tasks.grading.outside.service import serving
from tests.waiting import wait_for

AT_ONCE = 4
DRIVER = """
import sys
from cairn.configs.schema.reward import RewardConfig
from cairn.storage.opening import open_store
from cairn.tasks.grading.opening import open_grader
from cairn.tasks.rewards.sample import Sample
config = RewardConfig(rm_type="remote_rm", rm_url=sys.argv[1], rm_concurrency={at_once})
grader = open_grader(config, None, open_store(sys.argv[2]))
grader.grade([Sample(str(number), None) for number in range(40)])
"""


@pytest.mark.proof
def test_every_answer_is_paid_for_once_but_those_on_their_way_at_the_kill(tmp_path: Path):
    with serving(lambda body: float(body["response"]), seconds=0.1) as service:
        code = DRIVER.format(at_once=AT_ONCE)
        driver = subprocess.Popen([sys.executable, "-c", code, service.url, str(tmp_path)])
        wait_for(lambda: service.answered >= 12, 60)
        answers = tmp_path / "answers"
        wait_for(lambda: len(list(answers.glob("*/*.arrow"))) >= 2, 60)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        calls = len(service.requests)
        assert calls < 40
        store = open_store(str(tmp_path))
        config = RewardConfig(rm_type="remote_rm", rm_url=service.url, rm_concurrency=AT_ONCE)
        grader = open_grader(config, None, store)
        found = grader.grade([Sample(str(number), None) for number in range(40)])
        assert [one.reward for one in found] == list(map(float, range(40)))
        repeated = len(service.requests) - 40
        # A tenth of a second's answers were not durable yet, and the others still waited for.
        assert 0 <= repeated <= AT_ONCE * (0.2 / service.seconds + 1)
        calls = len(service.requests)
        assert grader.grade([Sample("7", None)])[0].reward == 7.0
        assert len(service.requests) == calls
        grader.close()
