"""A rollout engine is one folder, and its name in the line of `rollout.engine`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines import rollout
from cairn.engines.rollout.plan import EnginePlan, Place, kind_of, make_engine
from cairn.flows.driver.validation import setup_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from tests.local_fleet import LocalFleet
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

KIND = """
from cairn.engines.rollout.plan import EngineKind, EnginePlan, LaunchPlan

KIND = EngineKind(
    engine="cairn.engines.rollout.mine.engine:make",
    plan=lambda config, releases_memory: LaunchPlan((EnginePlan(),) * config.num_engines),
    problems=lambda config: ["mine has no routers"] if config.rollout.router else [],
)
"""
ENGINE = """
from cairn.engines.rollout.transformers.engine import TransformersEngine


class Mine(TransformersEngine):
    def environment(self):
        return super().environment().model_copy(update={"device": "mine"})


def make(model_path, config, plan, place, *limits):
    return Mine(model_path, config, plan.device)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder, and the line."""
    folder = tmp_path / "engines" / "mine"
    folder.mkdir(parents=True)
    for name, code in {"__init__": "", "kind": KIND, "engine": ENGINE}.items():
        (folder / f"{name}.py").write_text(code)
    monkeypatch.setattr(rollout, "__path__", [*rollout.__path__, str(folder.parent)])
    field = RolloutConfig.model_fields["engine"]
    before = field.annotation

    def line(annotation: Any) -> None:
        field.annotation = annotation
        for schema in (RolloutConfig, RunConfig):
            schema.model_rebuild(force=True)

    line(Literal["transformers", "sglang", "mine"])
    yield
    line(before)


def test_an_engine_from_outside_the_tree_is_checked_made_and_rolls_out(
    mine: None, tiny_assets: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_assets, rollout={"engine": "mine", "num_rollout": 1})
    assert setup_problems(config) == []
    routed = tiny_config(tiny_assets, rollout={"engine": "mine", "router": {"policy": "random"}})
    unread: list[str] = []
    assert setup_problems(routed, unread.append) == ["mine has no routers"]
    assert unread == ["rollout.router has no effect while rollout.engine is mine; leave it out"]
    assert len(kind_of("mine").plan(config.rollout, False).engines) == 1
    fleet = LocalFleet(config)
    engine = make_engine(config.model.path, config.rollout, EnginePlan(), Place())
    fleet.rollout[0].engine = engine
    with tiny_context(str(tmp_path / "store"), config, fleet=fleet) as (run, _):
        iteration(run, DirectSteps(run), 0)
        assert run.committed(0, Step.ROLLOUT, "00-000").environment.device == "mine"
        assert engine.get_weight_version() == 0
        assert run.committed(0, Step.TRAIN).state_digest
