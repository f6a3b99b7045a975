"""Which rollout engines there are: a folder each, and a line here."""

from importlib import import_module
from typing import Any

from cairn.configs.engines import reader_of
from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.view import view
from cairn.engines.rollout.plan import EngineKind

KINDS = {
    "transformers": "cairn.engines.rollout.transformers.kind",
    "sglang": "cairn.engines.rollout.sglang.kind",
}
"""Modules whose KIND describes an engine, by the name that `rollout.engine` gives it."""


def kind_of(engine: str) -> EngineKind:
    """What the driver knows of the engine that `rollout.engine` names."""
    found: EngineKind = import_module(KINDS[engine]).KIND
    return found


def make_engine(model_path: str, config: RolloutConfig, *args: Any) -> Any:
    """The engine that `rollout.engine` names, made in this process; see `EngineKind.engine`."""
    config = view(config, reader_of("rollout"), "rollout")
    module, _, name = kind_of(config.engine).engine.partition(":")
    return getattr(import_module(module), name)(model_path, config, *args)
