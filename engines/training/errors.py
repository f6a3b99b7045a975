"""What can go wrong in training that no restart mends."""


class NotFinite(Exception):
    """The loss or the gradient of an optimizer step is infinite or not a number; that step was not taken. The same
    weights and samples give the same result, so a new try will not help: the message says what to look at."""
