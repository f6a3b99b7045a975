"""One way to write a JSON value, so that equal values have equal bytes and one digest."""

import hashlib
import json
import math
from typing import Any

DEEPEST = 200
"""Lists and objects within each other, in what is read: whoever walks a value needs a few calls for each."""


def from_json(data: str | bytes) -> Any:
    """The value of a JSON text that somebody else may have written. Raises ValueError, also for one that is nested
    deeper than `DEEPEST`."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} lists and objects") from None
    openings = (b"[", b"{") if isinstance(data, bytes) else ("[", "{")
    if sum(map(data.count, openings)) > DEEPEST:  # type: ignore[arg-type]
        _require_shallow(value)
    return value


def _require_shallow(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if any(isinstance(inner, dict | list) for inner in level):
        raise ValueError(f"it is nested deeper than {DEEPEST} lists and objects")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def to_json(value: Any) -> str:
    """Canonical JSON of a value: keys sorted, no spaces, the shortest decimal that reads back as the same float; NaN
    and infinities as the strings "NaN", "Infinity" and "-Infinity". Raises TypeError where it is none."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """Hexadecimal SHA-256 of a value's canonical JSON, in UTF-8."""
    return hashlib.sha256(to_json(value).encode()).hexdigest()


def to_bytes(value: Any) -> bytes:
    """The value as indented JSON for files that people read too; equal values give equal bytes."""
    text = json.dumps(_plain(value), sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def seal(fields: dict[str, Any]) -> bytes:
    """The fields as a file that carries the digest of all of them under the key `digest`."""
    return to_bytes({**fields, "digest": digest(fields)})


def unseal(data: bytes) -> dict[str, Any]:
    """The fields of a sealed file, `digest` included. Raises ValueError, with what is wrong, unless these are exactly
    the bytes that `seal` made."""
    sealed = from_json(data)
    if not isinstance(sealed, dict) or "digest" not in sealed:
        raise ValueError("it carries no digest")
    found = digest({key: value for key, value in sealed.items() if key != "digest"})
    if found != sealed["digest"]:
        raise ValueError(f"it says its digest is {sealed['digest']}, its content has {found}")
    if to_bytes(sealed) != data:
        raise ValueError("its content is not written as it was")
    return sealed
