"""Cairn: durable reinforcement learning for language models. What user code imports is here; all else is below it.

Importing it costs next to nothing: what a name stands for is imported when it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cairn.configs.kinds import plugin as plugin
    from cairn.configs.schema.algorithm import AlgorithmConfig as AlgorithmConfig
    from cairn.engines.capture.session import capture as capture
    from cairn.engines.environments.mcp import mcp as mcp
    from cairn.engines.environments.openenv import OpenEnv
    from cairn.engines.environments.verifiers import verifiers as verifiers
    from cairn.engines.episodes.context import Context as Context
    from cairn.engines.tools.errors import JudgeFailed as JudgeFailed
    from cairn.engines.tools.tool import NOT_DONE as NOT_DONE
    from cairn.engines.tools.tool import Intent as Intent
    from cairn.engines.tools.tool import Tool as Tool
    from cairn.engines.tools.tool import ToolFailed as ToolFailed
    from cairn.engines.tools.tool import ToolLost as ToolLost
    from cairn.engines.tools.tool import ToolUnavailable as ToolUnavailable
    from cairn.engines.tools.tool import tool as tool
    from cairn.engines.training.collate import Tokens as Tokens
    from cairn.engines.trajectories import SampleRequest as SampleRequest
    from cairn.engines.trajectories import Segment as Segment
    from cairn.engines.trajectories import Trajectory as Trajectory
    from cairn.flows.reading.opened import opened
    from cairn.storage.query.errors import BadQuery as BadQuery
    from cairn.tasks.advantages.batch import ScoredBatch as ScoredBatch
    from cairn.tasks.benchmarks.sample import EvaluatedSample as EvaluatedSample
    from cairn.tasks.buffers.group import JudgedGroup as JudgedGroup
    from cairn.tasks.data import files
    from cairn.tasks.data.results import GroupResult as GroupResult
    from cairn.tasks.filters.decision import FilterDecision as FilterDecision
    from cairn.tasks.filters.sample import GradedSample as GradedSample
    from cairn.tasks.rewards import TryAgain as TryAgain
    from cairn.tasks.rewards.sample import ResponseSegment as ResponseSegment
    from cairn.tasks.rewards.sample import Sample as Sample

    file_rows = files.rows
    open = opened
    openenv = OpenEnv

_PLACES = {
    "BadQuery": "cairn.storage.query.errors",
    "AlgorithmConfig": "cairn.configs.schema.algorithm",
    "Context": "cairn.engines.episodes.context",
    "EvaluatedSample": "cairn.tasks.benchmarks.sample",
    "FilterDecision": "cairn.tasks.filters.decision",
    "GroupResult": "cairn.tasks.data.results",
    "GradedSample": "cairn.tasks.filters.sample",
    "Intent": "cairn.engines.tools.tool",
    "JudgeFailed": "cairn.engines.tools.errors",
    "JudgedGroup": "cairn.tasks.buffers.group",
    "NOT_DONE": "cairn.engines.tools.tool",
    "ResponseSegment": "cairn.tasks.rewards.sample",
    "Sample": "cairn.tasks.rewards.sample",
    "SampleRequest": "cairn.engines.trajectories",
    "ScoredBatch": "cairn.tasks.advantages.batch",
    "Segment": "cairn.engines.trajectories",
    "Tokens": "cairn.engines.training.collate",
    "Tool": "cairn.engines.tools.tool",
    "ToolFailed": "cairn.engines.tools.tool",
    "ToolLost": "cairn.engines.tools.tool",
    "ToolUnavailable": "cairn.engines.tools.tool",
    "Trajectory": "cairn.engines.trajectories",
    "TryAgain": "cairn.tasks.rewards",
    "capture": "cairn.engines.capture.session",
    "file_rows": "cairn.tasks.data.files:rows",
    "mcp": "cairn.engines.environments.mcp",
    "open": "cairn.flows.reading.opened:opened",
    "openenv": "cairn.engines.environments.openenv:OpenEnv",
    "plugin": "cairn.configs.kinds",
    "tool": "cairn.engines.tools.tool",
    "verifiers": "cairn.engines.environments.verifiers",
}

__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, called = _PLACES[name].partition(":")
    return getattr(importlib.import_module(module), called or name)
