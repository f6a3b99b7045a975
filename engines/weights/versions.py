"""Versions of a model's weights as files: whole, or as the lossless difference to an earlier version.

<folder>/whole-00003-00001.safetensors       of rank 3: tensors by the names of weight files, in the number format of
                                             rollout engines
<folder>/difference-00003-00001.safetensors  see `cairn.engines.weights.differences`; tensors that no file names are
                                             equal

A version is read from the last whole one up to it and the differences after that. The ledger says which these are, and
has the SHA-256 of every file and the checksum of the tensors (`cairn.storage.ledger.publications`).
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from threading import BoundedSemaphore, Lock
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from cairn.engines.models.published import is_exact
from cairn.engines.weights.differences import Change, decode, encode
from cairn.engines.weights.layout import DIFFERENCE, WHOLE, StoredVersion, is_whole
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import REQUESTS, Store, StoredFile

FILE_BYTES = 512 << 20
"""Greatest size of the weights of a file; a larger tensor has its own."""
Tensors = dict[str, torch.Tensor]
Content = TypeVar("Content")


class _Copy:
    """A version of the weights of this rank, on the host."""

    def __init__(self, digest: str, base: str | None) -> None:
        self.digest, self.base = digest, base
        self.tensors: Tensors = {}
        self.files: list[list[str]] = []
        """Names of the tensors of each file."""
        self.written = False


class VersionWriter:
    """Copies versions of weights to the host and writes them from there, while the weights may change. It keeps the
    last one that it wrote, so that the next can be written as a difference to it. So it holds two: 2 × 2 bytes a
    parameter in bfloat16."""

    def __init__(self, rank: int = 0) -> None:
        """`rank`: of the process, if several write the files of a version."""
        self._rank = rank
        self._kept: _Copy | None = None
        """The last version that was written before `_copied`."""
        self._copied: _Copy | None = None

    def keeps(self, digest: str | None) -> bool:
        """Return whether the last version that was written has this checksum."""
        newest = self._copied if self._copied is not None and self._copied.written else self._kept
        return digest is not None and newest is not None and newest.digest == digest

    def copy(
        self, buckets: Iterable[Mapping[str, torch.Tensor]], dtype: torch.dtype, digest: str, base: str | None
    ) -> int:
        """Copy a version; a copy that was not written is given up. Return its size in bytes.

        Iterates `buckets` to the end even after an error, because other ranks take part. After an error no copy is
        held.

        Args:
            buckets: weights, each once and with every version. A bucket becomes a file.
            dtype: number format of the rollout engines.
            digest: checksum of the weights in that format.
            base: checksum of the version to which the difference is to be written. None writes the whole version, and
                so does another version than the one that is kept.
        """
        before, self._copied = self._copied, None
        if before is not None and before.written:
            before, self._kept = self._kept, before
        room = {} if before is None else before.tensors
        copy = _Copy(digest, base if self.keeps(base) else None)
        failure: Exception | None = None
        for bucket in buckets:
            if failure is not None:
                continue
            try:
                copy.files.append(list(bucket))
                for name, tensor in bucket.items():
                    copy.tensors[name] = _rounded(name, tensor, dtype, room.pop(name, None))
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure
        self._copied = copy
        return sum(tensor.nbytes for tensor in copy.tensors.values())

    def write(self, store: Store, folder: str) -> list[StoredFile]:
        """Write the copied version below `folder`, as often as this is called. Return its files. Raises the store's
        errors."""
        copy, kept = self._copied, self._kept
        if copy is None:
            raise ValueError("no version is copied")
        base = kept.tensors if copy.base is not None and kept is not None else None
        kind = WHOLE if base is None else DIFFERENCE

        def write_file(number: int, names: list[str]) -> StoredFile:
            path = f"{folder}/{kind}-{self._rank:05d}-{number:05d}.safetensors"
            if base is None:
                data = save_safetensors({name: copy.tensors[name] for name in names})
            else:
                data = encode((name, base[name], copy.tensors[name]) for name in names)
            store.write(path, data)
            return StoredFile(path, len(data), hashlib.sha256(data).hexdigest())

        with ThreadPoolExecutor(_threads(), "weights") as pool:
            running = [pool.submit(write_file, *file) for file in enumerate(copy.files)]
            try:
                files = [one.result() for one in running]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        copy.written = True
        return files


def read_version(store: Store, versions: Sequence[StoredVersion]) -> Tensors:
    """Return the tensors of the last of `versions`, on the host: a whole version, and the differences after it.

    Raises:
        Damaged: a file is missing or altered, or is not what the versions before it need. The message names version
            and file.
    """
    whole, *later = versions
    tensors: Tensors = {}
    for content in _contents(store, [whole], WHOLE, load_safetensors):
        tensors |= content
    in_use = {name: Lock() for name in tensors}

    def change(data: bytes) -> None:
        for one in decode(data, tensors):
            with in_use[one.name]:
                one.apply_to(tensors[one.name])

    for _ in _contents(store, later, DIFFERENCE, change):  # in any order: steps are added, modulo 2^bits
        pass
    return tensors


class HeldVersion:
    """The version that an engine's tensors have, if they were read from a store: the next one is read as a difference.

    Args:
        tensors: returns the engine's tensors, contiguous, by the names of weight files; they are changed in place.
        load: copies whole weights into the engine.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, torch.Tensor]], load: Callable[[Tensors], None]) -> None:
        self.digest: str | None = None
        """Checksum of the tensors; None where they came in another way, or a change broke off."""
        self._tensors, self._load = tensors, load

    @torch.no_grad()
    def advance(self, store: Store, versions: Sequence[StoredVersion]) -> frozenset[str] | None:
        """Bring the tensors to the last of `versions` (see `read_version`). Return the names of those that changed;
        None where all weights were read. No tensor is changed before all files are read and verified. Raises
        Damaged."""
        held, self.digest = self.digest, None
        place = next((index for index, one in enumerate(versions) if one.digest == held), None)
        changed: frozenset[str] | None = None
        if place is None:
            self._load(read_version(store, versions))
        else:
            tensors = self._tensors()
            later = [changes(store, version, tensors) for version in versions[place + 1 :]]
            for differences in later:
                apply(differences, tensors)
            changed = frozenset(change.name for differences in later for change in differences)
        self.digest = versions[-1].digest
        return changed


def changes(store: Store, version: StoredVersion, tensors: Mapping[str, torch.Tensor]) -> list[Change]:
    """Return all changes of a version that is stored as a difference to `tensors`. Raises Damaged."""
    return list(chain.from_iterable(_contents(store, [version], DIFFERENCE, partial(_changes, tensors))))


def apply(differences: Iterable[Change], tensors: Mapping[str, torch.Tensor]) -> None:
    """Change the tensors in place for which the differences were read."""
    for change in differences:
        change.apply_to(tensors[change.name])


def _changes(tensors: Mapping[str, torch.Tensor], data: bytes) -> list[Change]:
    return list(decode(data, tensors))


def _contents(
    store: Store, versions: Iterable[StoredVersion], kind: str, parse: Callable[[bytes], Content]
) -> Iterator[Content]:
    """Yield what every file holds, in order; all are of one kind. The next files are read meanwhile, and parsed by as
    many threads as there are processors: more would only take memory and each other's cache."""
    parsing = BoundedSemaphore(_threads())
    with ThreadPoolExecutor(REQUESTS, "weights") as pool:
        running: deque[Future[Content]] = deque()
        for version in versions:
            for file in version.files:
                running.append(pool.submit(_content, store, version, file, kind, parse, parsing))
                if len(running) > REQUESTS:
                    yield running.popleft().result()
        for content in running:
            yield content.result()


def _content(
    store: Store,
    version: StoredVersion,
    file: StoredFile,
    kind: str,
    parse: Callable[[bytes], Content],
    parsing: BoundedSemaphore,
) -> Content:
    if is_whole([file]) is not (kind == WHOLE):
        raise Damaged(f"{file.path} is not what {version.name} needs: a whole version comes first, and only there")
    try:
        data = store.read(file.path)
    except FileNotFoundError:
        raise Damaged(f"{file.path}, a part of {version.name}, is missing") from None
    with parsing:
        sha256 = hashlib.sha256(data).hexdigest()
        if (len(data), sha256) != (file.bytes, file.sha256):
            raise Damaged(
                f"{file.path}, a part of {version.name}, is damaged: {file.bytes} bytes with SHA-256 {file.sha256} "
                f"were committed, {len(data)} bytes with {sha256} were read"
            )
        try:
            return parse(data)
        except (SafetensorError, ValueError) as error:
            raise Damaged(f"{file.path}, a part of {version.name}, is damaged: {error}") from None


def _rounded(name: str, tensor: torch.Tensor, dtype: torch.dtype, room: torch.Tensor | None) -> torch.Tensor:
    """Return a copy of a weight on the host as rollout engines hold it, in the memory of `room` where it fits."""
    kept = tensor.dtype if is_exact(name) or not tensor.is_floating_point() else dtype
    if room is None or room.shape != tensor.shape or room.dtype != kept:
        room = torch.empty(tensor.shape, dtype=kept)
    return room.copy_(tensor.detach())


def _threads() -> int:
    return max(1, min(REQUESTS, len(os.sched_getaffinity(0))))
