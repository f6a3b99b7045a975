"""How a call of a tool ends without a result, told apart by who is to hear of it.

| error | what happened | who hears of it |
|---|---|---|
| `ToolFailed` | the tool has answered, by failing: it is the result of the call, and recorded like one | the model |
| `ToolUnavailable` | the machine kept it from being called, and nothing was done | the run: the sample fails |
| `ToolLost` | its process was ended from outside while it was at work: what it has done is unknown | the run |
"""

from enum import StrEnum


def storable(text: str) -> str:
    """Half a surrogate pair is no text that can be stored."""
    return text.encode(errors="backslashreplace").decode()


class Reason(StrEnum):
    """Why a call failed, for counting."""

    ARGUMENTS = "arguments"
    """They do not fit the tool's parameters; it was not called."""
    RAISED = "raised"
    """It raised an error."""
    DEADLINE = "deadline"
    """It was not done in time."""
    DIED = "died"
    """It ended its process."""
    MEMORY = "memory"
    """It wanted more than it may have."""
    TYPE = "type"
    """It returned something that is no JSON value, such as bytes."""
    SIZE = "size"
    """It returned more than it may."""


class ToolFailed(Exception):
    """A call of a tool failed. The message names the tool and says why, in words that a model may be told."""

    def __init__(self, told: str, reason: Reason = Reason.RAISED) -> None:
        super().__init__(storable(told))
        self.reason = Reason(reason)

    def __reduce__(self) -> tuple[type["ToolFailed"], tuple[str, Reason]]:
        return type(self), (str(self), self.reason)


class JudgeFailed(Exception):
    """A grader that `ctx.judge` asked failed. The message names it and says why."""

    def __init__(self, told: str) -> None:
        super().__init__(storable(told))


class ToolUnavailable(Exception):
    """What a tool needs is missing here, such as a sandbox: no answer of the tool, and nothing to train on."""


class ToolLost(ToolUnavailable):
    """Something outside ended the tool's process: it may have done its work, a part of it, or nothing."""
