"""Publications: the weights that sync steps have stored, whole or as the difference to an earlier one.

```
000007/sync  whole         ◀── 000008/sync  difference ◀── 000009/sync  difference
```
A sync step's commit with files holds in its value `stored` which commit it is a difference to. So the weights of any
iteration are read by going back to a whole version; no trainer takes part. `cairn.engines.weights.versions` describes
the files.
"""

from collections.abc import Callable

from pydantic import Field

from cairn.storage.ledger.commits import Commit, Step, parse_commit_name
from cairn.storage.records import Record
from cairn.storage.store.errors import Damaged, naming_damaged

VALUE = "stored"
"""Name of the value in a sync step's commit."""
FORMAT = 1


class Stored(Record):
    """How the weights of a sync step are stored."""

    format: int = FORMAT
    base: str | None = Field(None, pattern=r"^[0-9]{6}/sync$")
    """Name of the commit that this is a difference to, such as `000041/sync`; None for whole weights."""
    base_digest: str | None = None
    """Digest of that commit."""
    differences: int = Field(0, ge=0)
    """Number of differences since the whole weights, this one included."""
    whole_bytes: int = Field(ge=0)
    """Size of the whole weights."""
    difference_bytes: int = Field(0, ge=0)
    """Size of all these differences."""


def stored(commit: Commit) -> Stored | None:
    """Return how the weights of a sync step are stored; None where they are not. Raises Damaged where the commit does
    not say so in a format that this version reads."""
    value = commit.values.get(VALUE)
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise Damaged(
            f"{commit.name} stores weights in another format than {FORMAT}, which this version of Cairn reads"
        )
    with naming_damaged(f"value {VALUE!r} of {commit.name}"):
        return Stored.model_validate(value)


Find = Callable[[int, Step, str | None], Commit | None]
"""Function that looks up a commit, such as `Ledger.find`."""


def base_of(find: Find, commit: Commit) -> Commit | None:
    """Return the sync step that the stored weights of another one are a difference to; None for whole weights. Raises
    Damaged unless it is the commit that the difference was made from."""
    how = stored(commit)
    if how is None or how.base is None:
        return None
    iteration, step, shard = parse_commit_name(how.base)
    base = find(iteration, step, shard) if iteration < commit.iteration else None
    if base is None or base.digest != how.base_digest or stored(base) is None:
        found = "is missing" if base is None else f"has digest {base.digest}"
        raise Damaged(
            f"the weights of {commit.name} are a difference to {how.base} with digest {how.base_digest}, which {found}"
        )
    return base


def chain(find: Find, commit: Commit) -> list[Commit]:
    """Return the sync steps from which the weights of one are read: whole weights, and the differences up to it. Looks
    up one commit for each difference. Raises Damaged."""
    commits = [commit]
    while (base := base_of(find, commits[-1])) is not None:
        commits.append(base)
    return commits[::-1]
