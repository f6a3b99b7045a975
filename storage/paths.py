"""What a path inside a store may look like."""

import re

_UNUSABLE = re.compile(r"[\\\x00-\x1f]")


def is_path(path: str) -> bool:
    """Whether a path stays below its root: names between single slashes, none of them empty, "." or "..", no backslash
    or control character."""
    return _UNUSABLE.search(path) is None and not any(name in ("", ".", "..") for name in path.split("/"))


def check_path(path: str) -> str:
    """Return a path that stays below its root, or raise ValueError."""
    if not is_path(path):
        raise ValueError(f"{path!r} is not a path inside a store: names between single slashes, without '.' and '..'")
    return path
