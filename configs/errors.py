"""What is wrong with a configuration."""

from collections.abc import Sequence


class ConfigError(Exception):
    """A configuration cannot be used. Each problem is one sentence that names the option and the way out."""

    def __init__(self, problems: Sequence[str]):
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)
