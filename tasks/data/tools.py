"""The tools of a run, as its prompts and its steps know them."""

from pathlib import Path
from typing import Any

from cairn.configs.schema.rollout import RolloutConfig


def told_tools(rollout: RolloutConfig) -> list[Any] | None:
    """What chat templates are told of `rollout.tools`; None where that is nothing. Raises BadPlugin."""
    if not rollout.tools or rollout.tool_call_format != "template":
        return None
    from cairn.engines.tools.loading import load_tools

    return [tool.schema for tool in load_tools(rollout.tools, rollout.tool_options).values()]


def searched(rollout: RolloutConfig) -> Path | None:
    """The corpus that the tool `search` looks into, where it is named."""
    corpus = rollout.tool_options.search.corpus if "search" in rollout.tools else None
    return None if corpus is None else Path(corpus).expanduser()
