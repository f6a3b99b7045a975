"""Self-tests of kinds of machines: whether they compute the same bits twice.

Each is one small file, created once and stored next to the runs. All runs of a store share it.
"""

from collections.abc import Callable

from pydantic import AliasChoices, Field

from cairn.storage.ledger import layout
from cairn.storage.records import Environment, Record
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store


class SelfTest(Record):
    """Result of computing the gradients of one batch twice from the same state."""

    schema_version: int = 1
    fingerprint: str
    """Digest of the environment, of the options that affect kernels and layout, and of the model."""
    environment: Environment
    agrees: bool
    """Whether both digests are equal."""
    digests: tuple[str, str] = Field(validation_alias=AliasChoices("digests", "state_digests"))
    """Digest of the gradients of each pass; `state_digests` in files of versions that compared whole updates."""
    run: str
    iteration: int
    """Iteration whose batch was used."""
    seconds: float
    """Duration of the test in seconds."""
    tested_at: float
    """Unix seconds."""


def find_self_test(store: Store, fingerprint: str) -> SelfTest | None:
    """Return the self-test of a kind of machine, or None if there is none. Raises Damaged."""
    path = layout.self_test(fingerprint)
    try:
        fields = canonical.unseal(store.read(path))
        return SelfTest.model_validate(fields)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Damaged(f"{path} cannot be trusted: {error}; remove it to repeat the self-test") from None


def record_self_test(store: Store, result: SelfTest, guard: Callable[[], None]) -> None:
    """Store a self-test unless there is one. `guard` is that of `Store.create`."""
    store.create(layout.self_test(result.fingerprint), canonical.seal(result.model_dump(mode="json")), guard)
