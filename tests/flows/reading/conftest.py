"""A written iteration whose commits have known times."""

from pathlib import Path

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.storage.ledger.commits import Commit
from cairn.storage.ledger.ledger import Ledger
from tests.flows.written_runs import config_of, new_run, write_iteration

TIMES: dict[str, tuple[float, float]] = {
    "eval": (0, 4),
    "rollout.00-000": (4, 10),
    "rollout.00-001": (4, 7),
    "reward": (10, 11),
    "filter": (11, 12),
    "advantage": (12, 13),
    "train": (14, 19),
    "checkpoint": (19, 20),
    "sync": (20, 22),
}
"""Seconds at which the first iteration's commits began and were made."""


def timed(commit: Commit) -> Commit:
    key = commit.name.partition("/")[2]
    began, ended = TIMES.get(key) or TIMES[commit.step]
    return commit.model_copy(update={"started_at": began, "committed_at": ended})


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return new_run(str(tmp_path))


@pytest.fixture
def config(ledger: Ledger) -> RunConfig:
    return config_of(ledger)


@pytest.fixture
def commits(ledger: Ledger) -> list[Commit]:
    return [timed(commit) for commit in write_iteration(ledger, 0)]
