"""The files that W&B writes offline, as far as it must be known what they hold. The library has no reader of its own.

A file is a log in LevelDB's format (https://github.com/google/leveldb/blob/main/doc/log_format.md) after seven bytes of
W&B's, with the CRC-32 of zlib; its records are protocol buffers that the library declares.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

_BEGIN = b":W&B\xe1\xbe\x00"
_BLOCK = 32768
_HEADER = struct.Struct("<IHB")
"""Checksum of type and data, bytes of data, type."""
_FULL, _FIRST, _LAST = 1, 2, 4


def history_steps(file: Path) -> Iterator[int]:
    """Steps of the rows in a file. A torn end is passed over."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined] # chosen by protobuf's version

    for record in records(file.read_bytes()):
        history = Record.FromString(record).history
        if history.item:
            yield history.step.num


def records(data: bytes) -> Iterator[bytes]:
    """The records of a log, up to the first piece that is torn or altered."""
    if not data.startswith(_BEGIN):
        return
    place, record = len(_BEGIN), b""
    while place + _HEADER.size <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER.size:  # no piece begins there
            place += left
            continue
        checksum, size, kind = _HEADER.unpack_from(data, place)
        place += _HEADER.size
        piece = data[place : place + size]
        if len(piece) < size or zlib.crc32(piece, zlib.crc32(bytes([kind]))) != checksum:
            return
        place += size
        record = piece if kind in (_FULL, _FIRST) else record + piece
        if kind in (_FULL, _LAST):
            yield record
