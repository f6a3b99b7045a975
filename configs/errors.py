"""Errors that a program expects, and those of configurations and data."""

from collections.abc import Sequence


class BadInput(Exception):
    """Input that does not exist or makes no sense. The message is one clear sentence."""


class Failure(Exception):
    """A failure that a correct program can have: of a machine, a service, a store or a computation. The message says
    what failed."""


def message_of(error: BaseException) -> str:
    """Return the message of an error, also of one whose class is broken."""
    try:
        return str(error)
    except Exception:
        return "its message cannot be read"


class ConfigError(BadInput):
    """A configuration cannot be used. Each problem is one sentence that names the option and says how to correct it."""

    def __init__(self, problems: Sequence[str]):
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class BadData(BadInput):
    """The data cannot be used as the configuration says; a retry will not help. The message says what to do."""


class BadPrompt(BadData):
    """A row cannot be made into a prompt; other rows may."""
