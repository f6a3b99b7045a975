"""What functions written for slime get: its `args` and the status of a sample."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from cairn.configs.counterparts import counterparts
from cairn.configs.plugins import BadPlugin


class Status(Enum):
    """Status of a sample. Pending and aborted samples are neither graded nor filtered."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class NoSuchFlag(BadPlugin, AttributeError):
    """slime has no such flag. As an AttributeError it lets `getattr(args, name, default)` return the default."""


class Arguments:
    """slime's `args`: options of a configuration under the names of slime's flags. Only the options that the caller of
    the function has declared are available."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Store `options`: the values that the caller reads, by their dotted names."""
        self._options = options

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        flag = counterparts().get(name)
        if flag is None or not flag.options:
            why = f"{flag.why or flag.how}" if flag else "slime has no such flag"
            message = f"args.{name} does not exist here: {why}; write what the function needs into its file"
            raise BadPlugin(message) if flag else NoSuchFlag(message)
        if flag.options[0] not in self._options:
            raise BadPlugin(
                f"args.{name} is {flag.options[0]} here, which the step that calls the function does not read: write "
                "its value into the function's file, whose source counts in the step's digest"
            )
        return self._options[flag.options[0]]
