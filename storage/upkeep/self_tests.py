"""What was found of kinds of machines: whether they give the same bits twice. One small file each, created once, beside
the runs: all runs of a store share what one of them found."""

from collections.abc import Callable

from cairn.storage.ledger import layout
from cairn.storage.records import Environment, Record
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store


class SelfTest(Record):
    """One update, done twice from the same state, across a restart of the training engine."""

    schema_version: int = 1
    fingerprint: str
    """Digest of the environment, of the options on which kernels and layout depend, and of the model."""
    environment: Environment
    agrees: bool
    """Whether both gave the same state."""
    state_digests: tuple[str, str]
    """What each gave."""
    run: str
    iteration: int
    """Whose batch it was."""
    seconds: float
    """That the test took."""
    tested_at: float
    """Unix seconds."""


def find_self_test(store: Store, fingerprint: str) -> SelfTest | None:
    """What was found; None where nobody has tried. Raises Damaged."""
    path = layout.self_test(fingerprint)
    try:
        fields = canonical.unseal(store.read(path))
        del fields["digest"]
        return SelfTest.model_validate(fields)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Damaged(f"{path} cannot be trusted: {error}; remove it, and it is tried again") from None


def record_self_test(store: Store, found: SelfTest, guard: Callable[[], None]) -> None:
    """Keep what was found; whoever was first stays. `guard`: see `Store.create`."""
    store.create(layout.self_test(found.fingerprint), canonical.seal(found.model_dump(mode="json")), guard)
