"""Errors of configurations and of data."""

from collections.abc import Sequence


class ConfigError(Exception):
    """A configuration cannot be used. Each problem is one sentence that names the option and says how to correct it."""

    def __init__(self, problems: Sequence[str]):
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class BadData(Exception):
    """The data cannot be used as the configuration says; a retry will not help. The message says what to do."""


class BadPrompt(BadData):
    """A row cannot be made into a prompt; other rows may."""
