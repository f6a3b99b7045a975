"""Storage of a training state that every rank writes and reads in parallel, its own part alone.

<folder>/00003-00001.part     numbers of rank 3's parts of tensors, back to back, in files of `FILE_BYTES`
<folder>/00003.index.json     where each part lies in its file and in its whole tensor, and the SHA-256 of every
                              `CHUNK_BYTES` of the files; carries its own digest
<folder>/<description>        format, weight version, state digest, and of every index its size and SHA-256; carries its
                              own digest; written last

Places are those of whole tensors under Hugging Face names, so any layout of ranks reads what any other wrote. A rank
reads the chunks that hold what it needs, by ranges. What several ranks need, one of them reads and sends to the others:
every byte is read once. A chunk is verified before any of its values is used.
"""

import hashlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import astuple, dataclass
from itertools import groupby, islice, zip_longest
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel, Field

from cairn.engines.training.checkpoint import Described, HashedFile, write_sealed
from cairn.engines.training.process import gathered
from cairn.engines.training.regions import Region
from cairn.engines.training.sharding import raise_together, raising_together
from cairn.engines.types.errors import EngineError
from cairn.engines.weights.fingerprint import bit_array
from cairn.storage.store.canonical import seal, unseal
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store, StoredFile

FORMAT = 2
FILE_BYTES = 1 << 27
CHUNK_BYTES = 1 << 22
"""Bytes that are verified together."""
RANGE_BYTES = 1 << 26
"""Greatest number of bytes of a request."""
TRANSFERS = 4
"""Files that a rank writes, and ranges that it reads, at a time."""
_ALIGNMENT = 8
"""Divisor of every part's place in its file: the greatest size of a number."""

DTYPES = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8")
}

NamedParts = Iterable[tuple[Region, torch.Tensor]]
"""Regions of whole tensors, and for each its elements [n]."""

_Targets = dict[str, list[tuple[Region, torch.Tensor]]]
"""Parts of each tensor that a rank holds, to be filled."""

_Count = Annotated[int, Field(ge=0)]


class PartFile(HashedFile):
    """A file of parts."""

    name: str = Field(pattern=r"^[0-9]{5}-[0-9]{5}\.part$")
    bytes: _Count
    chunks: list[str]
    """SHA-256 of every `chunk_bytes` of the file."""


class Part(BaseModel):
    """A part of a tensor in a file."""

    tensor: _Count
    """Index in `Index.tensors`."""
    dtype: str
    place: tuple[_Count, _Count, _Count, _Count, _Count, _Count, _Count, bool]
    """Fields of its region, from `row` on."""
    file: _Count
    """Index in `Index.files`."""
    offset: _Count


class IndexFile(HashedFile):
    """The index of what one rank wrote."""

    name: str = Field(pattern=r"^[0-9]{5}\.index\.json$")


class Index(BaseModel):
    """Content of an index."""

    chunk_bytes: Annotated[int, Field(gt=0, le=RANGE_BYTES, multiple_of=_ALIGNMENT)]
    files: list[PartFile]
    tensors: list[tuple[str, _Count, tuple[_Count, ...]]]
    """Name, columns and shape of every whole tensor of which there is a part."""
    parts: list[Part]


class PartsState(Described):
    """Content of the description."""

    indexes: list[IndexFile]


@dataclass(frozen=True)
class HostCopy:
    """A copy of a rank's part of a state on the host, in the form of the files that it is written to."""

    rank: int
    weight_version: int
    state_digest: str
    files: list[torch.Tensor]
    """Content of each file, uint8."""
    parts: list[tuple[Region, torch.dtype, int, int]]
    """Region, number format, file and offset of each part."""
    _made: Future[None]

    def wait(self) -> None:
        """Wait until the copy is made, or failed: `write_copy` raises why. Until then the state may not change."""
        wait([self._made])

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(map(len, self.files))


def copy_to_host(
    parts: NamedParts, *, rank: int, weight_version: int, state_digest: str, room: Sequence[torch.Tensor] = ()
) -> HostCopy:
    """Begin to copy a rank's part of a state to the host, pinned where it lies on a GPU. A thread copies while the
    model's passes go on; `HostCopy.wait` comes before the next change of the state.

    `room`: the files of an earlier copy, to write over: new memory takes several times as long as the copy itself.
    """
    listed = [(region, values) for region, values in parts if len(region)]
    total = sum(-(-values.nbytes // _ALIGNMENT) * _ALIGNMENT for _, values in listed)
    size = FILE_BYTES // _ALIGNMENT * _ALIGNMENT
    pinned = any(values.is_cuda for _, values in listed)
    sizes = [min(size, total - first) for first in range(0, total, size)]
    if [len(file) for file in room] == sizes and all(file.is_pinned() == pinned for file in room):
        files = list(room)
    else:
        files = [torch.empty(length, dtype=torch.uint8, pin_memory=pinned) for length in sizes]
    places: list[tuple[Region, torch.dtype, int, int]] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    at = 0
    for region, values in listed:
        first = 0
        while first < len(region):
            file, offset = divmod(at, size)
            last = min(len(region), first + (size - offset) // values.itemsize)
            end = offset + (last - first) * values.itemsize
            copies.append((files[file][offset:end], values[first:last].view(torch.uint8)))
            places.append((region.part(first, last), values.dtype, file, offset))
            if padding := -(end - offset) % _ALIGNMENT:
                files[file][end : end + padding] = 0  # so that equal states have equal files
            at += end - offset + padding
            first = last
    copier = ThreadPoolExecutor(1, thread_name_prefix="copy")
    stream = torch.cuda.Stream() if pinned else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    made = copier.submit(_copy, copies, stream)
    copier.shutdown(wait=False)
    return HostCopy(rank, weight_version, state_digest, files, places, made)


def _copy(copies: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: "torch.cuda.Stream | None") -> None:
    """Copy bytes to the host, from GPUs on a stream. NumPy copies in one thread; PyTorch's several would wait for each
    other where the passes keep all cores busy."""
    if stream is None:
        for into, source in copies:
            np.copyto(bit_array(into), bit_array(source))
        return
    with torch.cuda.stream(stream):
        for into, source in copies:
            into.copy_(source, non_blocking=True)
    stream.synchronize()


def write_copy(store: Store, folder: str, copy: HostCopy) -> list[StoredFile]:
    """Write a rank's files, and then its index, which is returned last. Raises the store's errors, and EngineError if
    the copy failed.

    Calls no other rank, so it may run while the rank trains.
    """
    try:
        copy._made.result()
    except Exception as error:
        message = f"the state was not copied to the host ({error!s:.200}): it has to be copied again"
        raise EngineError(message) from error

    def write(number: int) -> PartFile:
        data = copy.files[number].numpy().tobytes()
        name = f"{copy.rank:05d}-{number:05d}.part"
        chunks = [_sha256(data[first : first + CHUNK_BYTES]) for first in range(0, len(data), CHUNK_BYTES)]
        store.write(f"{folder}/{name}", data)
        return PartFile(name=name, bytes=len(data), sha256=_sha256(data), chunks=chunks)

    with ThreadPoolExecutor(TRANSFERS, thread_name_prefix="checkpoint") as pool:
        files = list(pool.map(write, range(len(copy.files))))
    tensors = {region.name: (region.name, region.columns, region.shape) for region, *_ in copy.parts}
    numbers = {name: number for number, name in enumerate(tensors)}
    parts = [
        Part(
            tensor=numbers[region.name],
            dtype=str(dtype).removeprefix("torch."),
            place=astuple(region)[3:],
            file=file,
            offset=offset,
        )
        for region, dtype, file, offset in copy.parts
    ]
    index = Index(chunk_bytes=CHUNK_BYTES, files=files, tensors=list(tensors.values()), parts=parts)
    data, name = seal(index.model_dump(mode="json")), f"{copy.rank:05d}.index.json"
    store.write(f"{folder}/{name}", data)
    stored = [StoredFile(f"{folder}/{file.name}", file.bytes, file.sha256) for file in files]
    return [*stored, StoredFile(f"{folder}/{name}", len(data), _sha256(data))]


def write_description(
    store: Store, path: str, indexes: Sequence[StoredFile], *, weight_version: int, state_digest: str
) -> StoredFile:
    """Write the description of a state whose ranks have written their indexes. Raises the store's errors."""
    files = [IndexFile(name=file.path.rpartition("/")[2], bytes=file.bytes, sha256=file.sha256) for file in indexes]
    state = PartsState(format=FORMAT, weight_version=weight_version, state_digest=state_digest, indexes=files)
    return write_sealed(store, path, state)


@dataclass(frozen=True)
class _StoredPart:
    region: Region
    dtype: torch.dtype
    offset: int


@dataclass(frozen=True)
class _StoredFile:
    path: str
    bytes: int
    chunks: list[str]
    chunk_bytes: int
    parts: list[_StoredPart]
    """In their order in the file."""

    def pieces(self, chunk: int) -> Iterator[tuple[_StoredPart, Region, int]]:
        """Yield what a chunk holds: the part, the region of the elements, and the offset in the chunk."""
        first, last = chunk * self.chunk_bytes, min(self.bytes, (chunk + 1) * self.chunk_bytes)
        begins = bisect_right(self.parts, first, key=lambda part: part.offset) - 1
        for part in islice(self.parts, max(0, begins), None):
            if part.offset >= last:
                return
            size = part.dtype.itemsize
            begin, end = max(first, part.offset), min(last, part.offset + len(part.region) * size)
            if begin < end:
                region = part.region.part((begin - part.offset) // size, (end - part.offset) // size)
                yield part, region, begin - first


class Saved:
    """What a checkpoint holds, the same on all ranks."""

    def __init__(self, folder: str, files: list[_StoredFile]) -> None:
        self.folder = folder
        self.files = files
        self.shapes = {part.region.name: part.region.shape for file in files for part in file.parts}
        """Shape of every whole tensor, by its name."""

    @classmethod
    def open(cls, store: Store, folder: str, state: PartsState, world_size: int, device: torch.device) -> "Saved":
        """Read the indexes; all ranks take part, and each reads some of them. Raises Damaged."""
        rank = dist.get_rank() if world_size > 1 else 0
        with raising_together(world_size, device):
            mine = [_read_index(store, folder, file) for file in state.indexes[rank::world_size]]
        return cls(folder, [file for own in gathered(mine, world_size) for files in own for file in files])


def _read_index(store: Store, folder: str, described: IndexFile) -> list[_StoredFile]:
    path = f"{folder}/{described.name}"
    try:
        data = store.read(path)
    except FileNotFoundError as error:
        raise Damaged(f"checkpoint file {path} is missing") from error
    described.check(path, len(data), _sha256(data))
    try:
        index = Index.model_validate(unseal(data))
        return _stored_files(folder, index)
    except (ValueError, IndexError) as error:
        raise Damaged(f"checkpoint file {path} is not an index of parts: {error!s:.200}") from error


def _stored_files(folder: str, index: Index) -> list[_StoredFile]:
    """Return an index's files with their parts. Raises ValueError and IndexError."""
    parts: list[list[_StoredPart]] = [[] for _ in index.files]
    for part in index.parts:
        name, columns, shape = index.tensors[part.tensor]
        dtype, region = DTYPES.get(part.dtype), Region(name, shape, columns, *part.place)
        if (
            dtype is None
            or not region.exists
            or part.offset % _ALIGNMENT
            or part.offset + len(region) * dtype.itemsize > index.files[part.file].bytes
        ):
            raise ValueError(f"it puts a part of {name} where there is none")
        if parts[part.file] and parts[part.file][-1].offset >= part.offset:
            raise ValueError(f"it lists the parts of {index.files[part.file].name} out of order")
        parts[part.file].append(_StoredPart(region, dtype, part.offset))
    for file in index.files:
        if len(file.chunks) != -(-file.bytes // index.chunk_bytes):
            raise ValueError(f"it does not have a digest of every part of {file.name}")
    return [
        _StoredFile(f"{folder}/{file.name}", file.bytes, file.chunks, index.chunk_bytes, own)
        for file, own in zip(index.files, parts, strict=True)
    ]


@dataclass(frozen=True)
class _Range:
    """Consecutive chunks of a file that the same ranks need; one of them reads it."""

    file: int
    first: int
    last: int
    ranks: tuple[int, ...]


def read_parts(
    store: Store,
    saved: Saved,
    targets: NamedParts,
    world_size: int,
    device: torch.device,
    wanted: Callable[[str], bool] = lambda name: True,
) -> None:
    """Fill tensors, or this rank's parts of them, from a checkpoint. All ranks take part.

    Args:
        targets: what this rank holds, in any number format, flattened views.
        wanted: which tensors of the checkpoint are read.

    Raises:
        Damaged: a file is missing or altered, or tensors are missing, unknown, or of another shape. The message names
            them.
        EngineError: another rank could not read its part.
    """
    rank = dist.get_rank() if world_size > 1 else 0
    by_name: _Targets = {}
    for region, into in targets:
        by_name.setdefault(region.name, []).append((region, into))
    known = set().union(*gathered(set(by_name), world_size))
    with raising_together(world_size, device):
        _check_names(saved, by_name, known, wanted)
    ranges = _assigned(saved, by_name, world_size)
    error: Exception | None = None
    filled = dict.fromkeys(by_name, 0)
    with ThreadPoolExecutor(TRANSFERS, thread_name_prefix="checkpoint") as pool:
        for wave, data in _read_ahead(store, saved, ranges, rank, pool):
            try:
                content = data.result() if data is not None else b""
            except Exception as failure:  # raised below, once the other ranks have got what they wait for
                error = error or failure
                mine = wave[rank]
                content = b"" if mine is None else bytes(_size(saved, mine))
            for held, received in _exchanged(saved, wave, content, rank, device):
                if error is None:
                    _fill(saved.files[held.file], held, received, by_name, filled)
    if error is None:
        lacking = sorted(name for name, parts in by_name.items() if filled[name] != sum(len(one) for one, _ in parts))
        if lacking:
            error = Damaged(
                f"checkpoint {saved.folder} lacks {_listed(lacking)} ({len(lacking)} in all), or parts of them"
            )
    raise_together(error, world_size, device)


def _check_names(saved: Saved, targets: _Targets, known: Set[str], wanted: Callable[[str], bool]) -> None:
    """Raise Damaged unless a checkpoint holds the tensors that the ranks know, and no others that are wanted."""
    if lacking := sorted(known - saved.shapes.keys()):
        raise Damaged(f"checkpoint {saved.folder} lacks {_listed(lacking)} ({len(lacking)} in all)")
    if unknown := sorted(name for name in saved.shapes.keys() - known if wanted(name)):
        raise Damaged(f"checkpoint {saved.folder} holds {_listed(unknown)}, which the model does not have")
    for name, shape in {(part.region.name, part.region.shape): None for file in saved.files for part in file.parts}:
        if name in targets and shape != targets[name][0][0].shape:
            raise Damaged(
                f"checkpoint {saved.folder} holds {name} as {shape}, where the model has {targets[name][0][0].shape}: "
                "it is a checkpoint of another model"
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name.replace(".", " of ", 1) for name in names[:3])


def _assigned(saved: Saved, targets: _Targets, world_size: int) -> list[list[_Range]]:
    """Return the ranges that each rank reads, in its order, the same on all ranks."""
    needed = np.array(
        [
            any(
                region.overlaps(target)
                for part, region, _ in file.pieces(chunk)
                for target, _ in targets.get(part.region.name, ())
            )
            for file in saved.files
            for chunk in range(len(file.chunks))
        ],
        dtype=bool,
    )
    packed = gathered(np.packbits(needed), world_size)
    of_chunks = np.stack([np.unpackbits(bits, count=len(needed)) for bits in packed], axis=1)
    assigned: list[list[_Range]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    begin = 0
    for number, file in enumerate(saved.files):
        needed_by = [tuple(np.flatnonzero(ranks).tolist()) for ranks in of_chunks[begin : begin + len(file.chunks)]]
        begin += len(file.chunks)
        most = max(1, RANGE_BYTES // file.chunk_bytes)
        for ranks, group in groupby(range(len(file.chunks)), needed_by.__getitem__):
            chunks = list(group)
            for at in range(0, len(chunks) if ranks else 0, most):
                own = chunks[at : at + most]
                reader = min(ranks, key=lambda one: (loads[one], one))
                loads[reader] += len(own)
                assigned[reader].append(_Range(number, own[0], own[-1] + 1, ranks))
    return assigned


def _read_ahead(
    store: Store, saved: Saved, ranges: list[list[_Range]], rank: int, pool: ThreadPoolExecutor
) -> Iterator[tuple[list[_Range | None], "Future[bytes] | None"]]:
    """Yield for each wave the range of every rank, and this rank's content. `TRANSFERS` ranges are read at a time."""
    ahead: deque[Future[bytes]] = deque()
    own = iter(ranges[rank])

    def begin() -> None:
        if (following := next(own, None)) is not None:
            ahead.append(pool.submit(_read_range, store, saved, following))

    for _ in range(TRANSFERS):
        begin()
    for wave in zip_longest(*ranges):
        yield list(wave), ahead.popleft() if wave[rank] is not None else None
        begin()


def _read_range(store: Store, saved: Saved, wanted: _Range) -> bytes:
    file = saved.files[wanted.file]
    first, size = wanted.first * file.chunk_bytes, _size(saved, wanted)
    try:
        data = store.read_range(file.path, first, first + size)
    except FileNotFoundError as error:
        raise Damaged(f"checkpoint file {file.path} is missing") from error
    for number, sha256 in enumerate(file.chunks[wanted.first : wanted.last]):
        begin = number * file.chunk_bytes
        content = data[begin : begin + file.chunk_bytes]
        if _sha256(content) != sha256:
            raise Damaged(
                f"checkpoint file {file.path} is damaged: its bytes {first + begin} to {first + begin + len(content)} "
                f"have SHA-256 {_sha256(content)}, where {sha256} was written"
            )
    return data


def _size(saved: Saved, one: _Range) -> int:
    file = saved.files[one.file]
    return min(file.bytes, one.last * file.chunk_bytes) - one.first * file.chunk_bytes


def _exchanged(
    saved: Saved, wave: list[_Range | None], content: bytes, rank: int, device: torch.device
) -> Iterator[tuple[_Range, torch.Tensor]]:
    """Yield the ranges of a wave that this rank needs: its own, and those that others have read and sent."""
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    mine = wave[rank]
    if mine is not None:
        yield mine, own
    if not any(one is not None and len(one.ranks) > 1 for one in wave):
        return
    sends = [len(own) if mine is not None and to != rank and to in mine.ranks else 0 for to in range(len(wave))]
    receives = [
        _size(saved, one) if one is not None and reader != rank and rank in one.ranks else 0
        for reader, one in enumerate(wave)
    ]
    sent = own.to(device).repeat(sum(size > 0 for size in sends))
    received = torch.empty(sum(receives), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, sent, receives, sends)
    for one, part in zip(wave, received.cpu().split(receives), strict=True):
        if one is not None and len(part):
            yield one, part.clone()


def _fill(
    file: _StoredFile,
    held: _Range,
    content: torch.Tensor,
    targets: _Targets,
    filled: dict[str, int],
) -> None:
    for number in range(held.first, held.last):
        begin = (number - held.first) * file.chunk_bytes
        for part, region, offset in file.pieces(number):
            size = len(region) * part.dtype.itemsize
            values = content[begin + offset : begin + offset + size].view(part.dtype)
            for target, into in targets.get(region.name, ()):
                if region.overlaps(target):
                    filled[region.name] += region.copy(values, target, into)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
