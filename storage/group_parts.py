"""The parts of a stream's logs, which are of use as long as one of their groups is open."""

from collections.abc import Collection, Iterable
from contextlib import suppress

from cairn.storage.errors import StoreError
from cairn.storage.store import Store


class GroupParts:
    """Those of one log. For one thread at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._groups: dict[str, set[int]] = {}

    def add(self, path: str, groups: Iterable[int]) -> None:
        """There is a part with rows of these open groups."""
        self._groups[path] = set(groups)

    def forget(self, groups: Collection[int]) -> None:
        """A commit has these groups: nobody needs their rows any more."""
        for ids in self._groups.values():
            ids.difference_update(groups)
        self.remove_used_up()

    def remove_used_up(self) -> None:
        """In vain where the store does not answer: a later driver removes what is left."""
        paths = [path for path, ids in self._groups.items() if not ids]
        with suppress(StoreError):
            for path in paths:
                self._store.delete(path)
                del self._groups[path]
