"""Digests of configuration values. Equal values have equal digests on every machine."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

from pydantic import BaseModel


def canonical_json(value: Any) -> bytes:
    """Return `value` as JSON in canonical form: keys sorted, no spaces, UTF-8, shortest round-trip floats.

    Raises ValueError for NaN and infinity, which JSON lacks.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(config: BaseModel, fields: Sequence[str]) -> str:
    """Return the SHA-256, in hex, of the named fields of a configuration: of what a step reads, and nothing else.

    `fields` are dotted names such as `rollout`, `data.path` or `seed`; a section includes all its options. Their order
    does not matter. Raises AttributeError for a name that the configuration lacks.
    """
    read: dict[str, Any] = {}
    for name in fields:
        *sections, last = name.split(".")
        owner: Any = reduce(getattr, sections, config)
        if last not in type(owner).model_fields:
            raise AttributeError(f"{name} is not an option of {type(config).__name__}")
        read[name] = owner.model_dump(mode="json", include={last})[last]
    return hashlib.sha256(canonical_json(read)).hexdigest()


def recorded_digest(config: Mapping[str, Any], fields: Sequence[str]) -> str:
    """Return the `digest` of a configuration in JSON values, as a ledger records it. Raises KeyError for an unknown
    name."""
    read = {name: reduce(getitem, name.split("."), config) for name in fields}
    return hashlib.sha256(canonical_json(read)).hexdigest()
