"""Cairn: durable reinforcement learning for language models. User code imports from here; the rest is in subpackages.

The import is cheap: each name is imported at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cairn.configs.kinds import plugin as plugin
    from cairn.configs.schema.algorithm import AlgorithmConfig as AlgorithmConfig
    from cairn.engines.agents.capture.server import capture as capture
    from cairn.engines.agents.environments.mcp import mcp as mcp
    from cairn.engines.agents.environments.openenv import OpenEnv
    from cairn.engines.agents.environments.verifiers import verifiers as verifiers
    from cairn.engines.agents.episodes.context import Context as Context
    from cairn.engines.agents.tools.errors import JudgeFailed as JudgeFailed
    from cairn.engines.agents.tools.tool import NOT_DONE as NOT_DONE
    from cairn.engines.agents.tools.tool import Intent as Intent
    from cairn.engines.agents.tools.tool import Tool as Tool
    from cairn.engines.agents.tools.tool import ToolFailed as ToolFailed
    from cairn.engines.agents.tools.tool import ToolLost as ToolLost
    from cairn.engines.agents.tools.tool import ToolUnavailable as ToolUnavailable
    from cairn.engines.agents.tools.tool import tool as tool
    from cairn.engines.training.collate import Tokens as Tokens
    from cairn.engines.types.trajectories import SampleRequest as SampleRequest
    from cairn.engines.types.trajectories import Segment as Segment
    from cairn.engines.types.trajectories import Trajectory as Trajectory
    from cairn.flows.reading.opened import opened
    from cairn.storage.store.errors import BadQuery as BadQuery
    from cairn.tasks.advantages.batch import ScoredBatch as ScoredBatch
    from cairn.tasks.data import files
    from cairn.tasks.data.stream import GroupResult as GroupResult
    from cairn.tasks.grading.graded import GradedSample as GradedSample
    from cairn.tasks.rewards.grader import TryAgain as TryAgain
    from cairn.tasks.rewards.sample import ResponseSegment as ResponseSegment
    from cairn.tasks.rewards.sample import Sample as Sample
    from cairn.tasks.selecting.buffers.group import JudgedGroup as JudgedGroup
    from cairn.tasks.selecting.filters.sample import FilterDecision as FilterDecision

    EvaluatedSample = GradedSample
    file_rows = files.rows
    open = opened
    openenv = OpenEnv

_PLACES = {
    "BadQuery": "cairn.storage.store.errors",
    "AlgorithmConfig": "cairn.configs.schema.algorithm",
    "Context": "cairn.engines.agents.episodes.context",
    "EvaluatedSample": "cairn.tasks.grading.graded:GradedSample",
    "FilterDecision": "cairn.tasks.selecting.filters.sample",
    "GroupResult": "cairn.tasks.data.stream",
    "GradedSample": "cairn.tasks.grading.graded",
    "Intent": "cairn.engines.agents.tools.tool",
    "JudgeFailed": "cairn.engines.agents.tools.errors",
    "JudgedGroup": "cairn.tasks.selecting.buffers.group",
    "NOT_DONE": "cairn.engines.agents.tools.tool",
    "ResponseSegment": "cairn.tasks.rewards.sample",
    "Sample": "cairn.tasks.rewards.sample",
    "SampleRequest": "cairn.engines.types.trajectories",
    "ScoredBatch": "cairn.tasks.advantages.batch",
    "Segment": "cairn.engines.types.trajectories",
    "Tokens": "cairn.engines.training.collate",
    "Tool": "cairn.engines.agents.tools.tool",
    "ToolFailed": "cairn.engines.agents.tools.tool",
    "ToolLost": "cairn.engines.agents.tools.tool",
    "ToolUnavailable": "cairn.engines.agents.tools.tool",
    "Trajectory": "cairn.engines.types.trajectories",
    "TryAgain": "cairn.tasks.rewards.grader",
    "capture": "cairn.engines.agents.capture.server",
    "file_rows": "cairn.tasks.data.files:rows",
    "mcp": "cairn.engines.agents.environments.mcp",
    "open": "cairn.flows.reading.opened:opened",
    "openenv": "cairn.engines.agents.environments.openenv:OpenEnv",
    "plugin": "cairn.configs.kinds",
    "tool": "cairn.engines.agents.tools.tool",
    "verifiers": "cairn.engines.agents.environments.verifiers",
}

__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, called = _PLACES[name].partition(":")
    return getattr(importlib.import_module(module), called or name)


def __dir__() -> list[str]:
    return __all__
