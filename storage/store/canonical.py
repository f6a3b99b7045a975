"""Canonical JSON: equal values have equal bytes and one digest."""

import hashlib
import json
import math
from typing import Any

MAX_DEPTH = 200
"""Greatest nesting depth of JSON that is read. Code that walks a value needs a few stack frames for each level."""
_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} lists and objects"


def from_json(data: str | bytes) -> Any:
    """Return the value of an untrusted JSON text. Raises ValueError, also if it is nested deeper than `MAX_DEPTH`."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    openings = (b"[", b"{") if isinstance(data, bytes) else ("[", "{")
    if sum(map(data.count, openings)) > MAX_DEPTH:  # type: ignore[arg-type]
        _require_shallow(value)
    return value


def _require_shallow(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if any(isinstance(inner, dict | list) for inner in level):
        raise ValueError(_TOO_DEEP)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def to_json(value: Any) -> str:
    """Return canonical JSON of a value. Raises TypeError if the value is not JSON.

    Keys are sorted, and there are no spaces. Floats are the shortest decimals that read back equal; NaN and infinities
    are the strings "NaN", "Infinity" and "-Infinity".
    """
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """Return the hexadecimal SHA-256 of a value's canonical JSON in UTF-8."""
    return hashlib.sha256(to_json(value).encode()).hexdigest()


def to_bytes(value: Any) -> bytes:
    """Return a value as indented JSON, for files that people also read. Equal values give equal bytes."""
    text = json.dumps(_plain(value), sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def seal(fields: dict[str, Any]) -> bytes:
    """Return the fields as a file that carries the digest of all of them under the key `digest`."""
    return to_bytes({**fields, "digest": digest(fields)})


def unseal(data: bytes) -> dict[str, Any]:
    """Return the fields of a sealed file, without `digest`.

    Raises ValueError, saying what is wrong, unless these are exactly the bytes that `seal` made.
    """
    fields = from_json(data)
    if not isinstance(fields, dict) or "digest" not in fields:
        raise ValueError("it has no digest")
    recorded = fields.pop("digest")
    if (actual := digest(fields)) != recorded:
        raise ValueError(f"it records the digest {recorded}, but its content has {actual}")
    if seal(fields) != data:
        raise ValueError("its bytes are not those that were sealed")
    return fields
