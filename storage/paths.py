"""What a path inside a store may look like."""

import re

_NAME = r"(?!\.{1,2}(?:/|\Z))[^/\\\x00-\x1f]+"
_PATH = re.compile(f"{_NAME}(?:/{_NAME})*")


def is_path(path: str) -> bool:
    """Whether a path stays below its root: names between single slashes, none of them empty, "." or "..", no backslash
    or control character."""
    return _PATH.fullmatch(path) is not None


def check_path(path: str) -> str:
    """Return a path that stays below its root, or raise ValueError."""
    if not is_path(path):
        raise ValueError(f"{path!r} is not a path inside a store: names between single slashes, without '.' and '..'")
    return path
