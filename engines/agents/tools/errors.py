"""Errors of tool calls, by who receives them.

| error | meaning | receiver |
|---|---|---|
| `ToolFailed` | the tool's response is a failure: it is the result of the call, and recorded | the model |
| `ToolUnavailable` | the machine could not make the call, and nothing was done | the run: the sample fails |
| `ToolLost` | its process was killed from outside during the call: the effect is unknown | the run |
"""

from enum import StrEnum


def storable(text: str) -> str:
    """Escape lone surrogates, which cannot be stored."""
    return text.encode(errors="backslashreplace").decode()


class Reason(StrEnum):
    """Reasons of failed calls, for metrics."""

    ARGUMENTS = "arguments"
    """The arguments do not match the tool's parameters; the tool was not called."""
    RAISED = "raised"
    """The tool raised an error."""
    DEADLINE = "deadline"
    """The call exceeded its timeout."""
    DIED = "died"
    """The call ended its process."""
    MEMORY = "memory"
    """The call exceeded its memory limit."""
    TYPE = "type"
    """The result is not a JSON value, for example bytes."""
    SIZE = "size"
    """The result exceeds its maximum size."""


class ToolFailed(Exception):
    """A call of a tool failed. The message names the tool and the reason, in words for the model."""

    def __init__(self, told: str, reason: Reason = Reason.RAISED) -> None:
        super().__init__(storable(told))
        self.reason = Reason(reason)

    def __reduce__(self) -> tuple[type["ToolFailed"], tuple[str, Reason]]:
        return type(self), (str(self), self.reason)


class JudgeFailed(Exception):
    """A grader that `ctx.judge` called failed. The message names it and the reason."""

    def __init__(self, told: str) -> None:
        super().__init__(storable(told))


class ToolUnavailable(Exception):
    """This machine lacks what a tool needs, such as a sandbox: not a result of the tool, and nothing to train on."""


class ToolLost(ToolUnavailable):
    """The tool's process was killed from outside: the call may be done, partly done or not done."""
