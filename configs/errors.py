"""What can be wrong with data."""

from collections.abc import Sequence

# What is wrong with a configuration.


class ConfigError(Exception):
    """A configuration cannot be used. Each problem is one sentence that names the option and the way out."""

    def __init__(self, problems: Sequence[str]):
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class BadData(Exception):
    """The data cannot be used as the configuration says; a new try will not help. The message says what to do."""


class BadPrompt(BadData):
    """A row that gives no prompt; the others may."""
