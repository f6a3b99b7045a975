"""Which iterations of a run have files. Folders are listed, not what is in them."""

from collections.abc import Sequence

from cairn.storage import layout
from cairn.storage.store import Store

_PAGE = 1000
"""Names that an object store lists at a time, at most."""


def iterations_with_files(store: Store, run: str) -> list[int]:
    """All of them, sorted. One request a thousand."""
    return _numbers(store.list(layout.iterations(run)))


def newest_iteration_with_files(store: Store, run: str, first: int) -> int:
    """The last one from `first` on; less than that if there is none. Lists further and further ahead and then in the
    middle, so that most of a long run is passed over: requests grow with the logarithm of the iterations."""
    low, high, stride = first, None, 0
    numbers, more = _page(store, run, low)
    while more and numbers:
        low = numbers[-1] + 1
        if high is None:
            ahead, stride = min(low + stride, layout.LAST_NUMBER), max(_PAGE, 2 * stride)
        else:
            ahead = low + (high - low) // 2 if high - low > _PAGE else low
        found, further = _page(store, run, ahead)
        if found:
            numbers, more = found, further
        else:
            high, more = ahead, ahead > low
    return numbers[-1] if numbers else first - 1


def _page(store: Store, run: str, first: int) -> tuple[list[int], bool]:
    """Some of those from one on, and whether there are more."""
    names, more = store.page(layout.iterations(run), layout.digits(first))
    return _numbers(names), more


def _numbers(names: Sequence[str]) -> list[int]:
    return [number for name in names if (number := layout.parse_iteration(name)) is not None]
