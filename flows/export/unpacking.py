"""Unpacking a zip file that somebody sent, within bounds that are checked before anything is written.

| refused | bound |
|---|---|
| more members | `MOST_MEMBERS` |
| more bytes, unpacked | `FREE` and `RATIO` times the archive's own, and what the disk has |
| a larger JSON, signature or source file | `LONGEST_RECORD` of the store |
| a member twice, a link, a name outside the folders that are asked for | |
| an encrypted member, another compression than deflate | |

What a member says of its size holds: no more of it is unpacked, and its checksum is looked at.
"""

import shutil
import stat
import zlib
from collections.abc import Collection
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from cairn.storage.paths import check_path
from cairn.storage.store import LONGEST_RECORD

MOST_MEMBERS = 200_000
"""A bundle's are the commits of a run up to one sample: ten an iteration, and a few tables."""
FREE = 2**30
RATIO = 20
"""Tables and weights are packed already, or random: these come to less than 3."""
_TEXTS = (".json", ".sig", ".py")
_ENCRYPTED = 0x1


def unpack(file: Path, folder: Path, first: str, inside: Collection[str]) -> bytes:
    """Unpack all members below the folders `inside` into `folder`, and return the bytes of the member `first`. Raises
    ValueError, with what is wrong, and FileNotFoundError; nothing is written then that does not go with `folder`."""
    packed = file.stat().st_size
    try:
        with ZipFile(file) as opened:
            members = opened.infolist()
            _check(members, packed, shutil.disk_usage(folder).free, first, inside)
            for member in members:
                if member.filename != first:
                    opened.extract(member, folder)
            return opened.read(first)
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    except (BadZipFile, RuntimeError, OSError, EOFError, zlib.error) as error:  # as where a file has a folder's name
        raise ValueError(f"it cannot be unpacked: {error}") from None


def _check(members: list[ZipInfo], packed: int, free: int, first: str, inside: Collection[str]) -> None:
    if len(members) > MOST_MEMBERS:
        raise ValueError(f"it has {len(members)} members, and {MOST_MEMBERS} at most are unpacked")
    names = [member.filename for member in members]
    if len(set(names)) < len(names):
        raise ValueError("it has several members of one name")
    for member in members:
        _check_member(member, first, inside)
    total, most = sum(member.file_size for member in members), FREE + RATIO * packed
    if total > most:
        raise ValueError(f"it would be {total} bytes unpacked, and {most} at most are unpacked from {packed}")
    if total > free:
        raise ValueError(f"it would be {total} bytes unpacked, and {free} are free: set TMPDIR to a folder with more")


def _check_member(member: ZipInfo, first: str, inside: Collection[str]) -> None:
    name = check_path(member.filename)
    if name != first and name.partition("/")[0] not in inside:
        raise ValueError(f"its member {name!r} lies in none of its folders")
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        raise ValueError(f"its member {name!r} is a link or no file")
    if member.flag_bits & _ENCRYPTED or member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise ValueError(f"its member {name!r} is encrypted, or packed otherwise than by deflate")
    if name.endswith(_TEXTS) and member.file_size > LONGEST_RECORD:
        raise ValueError(f"its member {name!r} has {member.file_size} bytes, and {LONGEST_RECORD} at most are read")
