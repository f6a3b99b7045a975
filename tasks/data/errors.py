"""What can be wrong with data."""


class BadData(Exception):
    """The data cannot be used as the configuration says; a new try will not help. The message says what to do."""


class BadPrompt(BadData):
    """A row that gives no prompt; the others may."""
