"""Values of the ledger, and the format that they are written in."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from cairn.storage import canonical

FORMAT = 3
"""Of what this version writes."""
OLDEST_FORMAT = 2
"""That it reads: `tests/fixtures/ledgers` holds a ledger of each format from here on."""


class Record(BaseModel):
    """A frozen value of the ledger."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Marker(Record):
    """A record in a file of its own, which carries the digest of all of it: what it tells of exists with the file."""

    schema_version: int = FORMAT

    @property
    def digest(self) -> str:
        """Of the canonical JSON of all fields."""
        return canonical.digest(self._fields())

    def to_bytes(self) -> bytes:
        """The file."""
        return canonical.seal(self._fields())

    @classmethod
    def unsealed(cls, data: bytes) -> Self:
        """Read a file. Raises ValueError, with what is wrong, unless its bytes are those that `to_bytes` gave."""
        return cls.model_validate(readable(data))

    def _fields(self) -> dict[str, Any]:
        # What a marker was written without stays out of its digest: older versions knew fewer fields.
        return {"schema_version": self.schema_version, **self.model_dump(mode="json", exclude_unset=True)}


def readable(data: bytes) -> dict[str, Any]:
    """The fields of a sealed file, without its digest. Raises ValueError unless its bytes are those that were written,
    in a format that this version reads."""
    fields = canonical.unseal(data)
    require_readable(fields)
    del fields["digest"]
    return fields


def require_readable(fields: Mapping[str, Any]) -> None:
    """Raise ValueError unless a file's format is one that this version reads."""
    found = fields.get("schema_version")
    if not isinstance(found, int) or not OLDEST_FORMAT <= found <= FORMAT:
        raise ValueError(
            f"it has format {found}, this Cairn reads formats {OLDEST_FORMAT} to {FORMAT}; use the version that wrote "
            "it, or a newer one"
        )
