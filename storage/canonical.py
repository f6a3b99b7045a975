"""One way to write a JSON value, so that equal values have equal bytes and one digest."""

import hashlib
import json
import math
from typing import Any


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
    sealed = json.loads(data)
    if not isinstance(sealed, dict) or "digest" not in sealed:
        raise ValueError("it carries no digest")
    found = digest({key: value for key, value in sealed.items() if key != "digest"})
    if found != sealed["digest"]:
        raise ValueError(f"it says its digest is {sealed['digest']}, its content has {found}")
    if to_bytes(sealed) != data:
        raise ValueError("its content is not written as it was")
    return sealed
