"""Whether the rollout engines that serve are enough. How they join and leave: `tests/flows/test_elastic.py`."""

from typing import Any

import pytest

from cairn.configs.schema.operations import FleetConfig
from cairn.engines.fleet.membership import Elastic
from cairn.engines.types.errors import EngineError
from tests.waiting import wait_for


def test_a_run_waits_for_engines_for_as_long_as_one_may_take_to_start_and_then_says_what_it_lacks() -> None:
    engines: list[Any] = ["one", "other"]
    nodes = {engines[0]: lambda: {"machine"}, engines[1]: lambda: None}
    membership = Elastic(nodes, 2, FleetConfig(start_timeout=0.5), lambda sentence: None)
    assert membership.members == ["one"]
    assert not membership.enough()

    def lacks() -> bool:
        try:
            return membership.enough()
        except EngineError:
            return True

    wait_for(lacks, 60)
    with pytest.raises(EngineError, match=r"^1 of 2 rollout engines serve, fewer than rollout.min_num_engines \(2\)"):
        membership.serving()
