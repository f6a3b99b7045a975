"""How a query fails."""


class BadQuery(Exception):
    """The text asks for what is not there, or for more than reading the ledger. The message says what and where."""
