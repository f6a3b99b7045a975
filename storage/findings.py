"""What reading a run again can find wrong with it."""

from enum import StrEnum

from cairn.storage.records import Record


class Fault(StrEnum):
    """What can be wrong with a run."""

    UNREADABLE = "unreadable"
    """A manifest or commit is not what was written."""
    MISSING = "missing"
    """A committed file is gone."""
    ALTERED = "altered"
    """A committed file has other bytes."""
    UNREDACTED = "unredacted"
    """A redaction of a committed file is recorded and not done: it was interrupted."""
    INPUT_MISSING = "input_missing"
    """A commit was made from one that is gone."""
    INPUT_DIFFERS = "input_differs"
    """A commit was made from one that has another digest now."""
    TRAINED_TWICE = "trained_twice"
    """A group is trained on by the batches of two iterations, or twice by one."""
    GROUP_LOST = "group_lost"
    """A group was generated or left open, and the next batch says nothing of it."""
    GROUP_DIFFERS = "group_differs"
    """What a batch says of a group is not what the commits before it say."""
    CALLS_DIFFER = "calls_differ"
    """A sample's tokens are not those of its recorded calls."""
    ADMISSION_DIFFERS = "admission_differs"
    """An admission of a stream is missing, or not what was claimed."""


class Finding(Record):
    """One fault."""

    fault: Fault
    path: str
    """Store path of what is wrong."""
    message: str
    """One sentence with what was expected and found."""
