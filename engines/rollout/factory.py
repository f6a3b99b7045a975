"""Which rollout engines there are: a folder each, whose `kind` describes it, and the line of `rollout.engine`."""

from importlib import import_module
from typing import Any, get_args

from cairn.configs.engines import reader_of
from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.view import view
from cairn.engines.rollout.plan import EngineKind

NAMES: tuple[str, ...] = get_args(RolloutConfig.model_fields["engine"].annotation)
"""What `rollout.engine` may name."""


def kind_of(engine: str) -> EngineKind:
    """What the driver knows of the engine that `rollout.engine` names."""
    found: EngineKind = import_module(f"cairn.engines.rollout.{engine}.kind").KIND
    return found


def make_engine(model_path: str, config: RolloutConfig, *args: Any) -> Any:
    """The engine that `rollout.engine` names, made in this process; see `EngineKind.engine`."""
    config = view(config, reader_of("rollout"), "rollout")
    module, _, name = kind_of(config.engine).engine.partition(":")
    return getattr(import_module(module), name)(model_path, config, *args)
