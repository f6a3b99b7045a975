"""The tools of a run, by the names that `rollout.tools` has for them."""

from collections.abc import Sequence
from typing import Any

from cairn.configs.kinds import TOOL
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.tools import ToolOptions
from cairn.engines.tools.tool import Tool


def load_tools(names: Sequence[str], options: ToolOptions) -> dict[str, Tool]:
    """By the names that models call them by, in order. Raises BadPlugin."""
    found: dict[str, Tool] = {}
    for name in names:
        loaded: Any = TOOL.load(name)
        tool: Tool = loaded if isinstance(loaded, Tool) else loaded(options)
        if tool.name in found:
            raise BadPlugin(f"rollout.tools names two tools that are called {tool.name!r}: give one another `name`")
        found[tool.name] = tool
    return found
