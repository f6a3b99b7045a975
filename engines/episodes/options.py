"""What an episode is given of a run's configuration, besides how it samples. Plain values, for another process."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from cairn.configs.schema.tools import ToolOptions

if TYPE_CHECKING:
    from cairn.configs.schema.rollout import RolloutConfig


@dataclass(frozen=True)
class EpisodeOptions:
    """Of the section `rollout`, where each is described."""

    tools: tuple[str, ...] = ()
    tool_options: ToolOptions = field(default_factory=ToolOptions)
    tool_call_format: Literal["template", "tags"] = "template"
    max_turns: int = 16
    max_context_len: int | None = None

    @classmethod
    def of(cls, rollout: "RolloutConfig") -> "EpisodeOptions":
        """Of a run."""
        return cls(
            rollout.tools,
            rollout.tool_options,
            rollout.tool_call_format,
            rollout.max_turns,
            rollout.rollout_max_context_len,
        )
