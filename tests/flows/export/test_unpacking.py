"""An archive that somebody sent is unpacked within bounds, or not at all."""

import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, ZipFile, ZipInfo

import pytest

from cairn.flows.export import unbundle as unpacking
from cairn.flows.export.unbundle import BadBundle, check, unpack
from cairn.storage.store.store import LONGEST_RECORD
from tests.tables import cases

FIRST = "bundle.json"


def written(path: Path, *members: tuple[str | ZipInfo, bytes], packed_by: int = ZIP_DEFLATED) -> Path:
    with ZipFile(path, "w", packed_by) as opened:
        for name, data in members:
            opened.writestr(name, data)
    return path


def linked(name: str) -> ZipInfo:
    info = ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


def many(path: Path) -> None:
    written(path, (FIRST, b"{}"), *((f"store/{number}.json", b"{}") for number in range(12)))


def encrypted(path: Path) -> None:
    written(path, (FIRST, b"{}"), ("store/a.json", b"x"))
    data = bytearray(path.read_bytes())
    for header, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.rindex(header) + at] |= 1
    path.write_bytes(data)


def twice(path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        written(path, (FIRST, b"{}"), ("store/a.json", b"1"), ("store/a.json", b"2"))


def cut(path: Path) -> None:
    written(path, (FIRST, b"{}"), ("store/a.parquet", bytes(range(256)) * 40))
    data = bytearray(path.read_bytes())
    data[60:90] = bytes(30)
    path.write_bytes(data)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "bomb": (lambda path: written(path, (FIRST, b"{}"), ("store/a.parquet", bytes(2**22))), "bytes unpacked"),
    "large record": (lambda path: written(path, (FIRST, bytes(3 * 2**16))), "but at most"),
    "large source": (lambda path: written(path, (FIRST, b"{}"), ("grader/g.py", bytes(3 * 2**16))), "but at most"),
    "many": (many, "members, but at most 10"),
    "twice": (twice, "several members with the same name"),
    "link": (lambda path: written(path, (FIRST, b"{}"), (linked("store/l"), b"/etc/passwd")), "a link"),
    "elsewhere": (lambda path: written(path, (FIRST, b"{}"), ("other/x", b"1")), "in none of its folders"),
    "above": (lambda path: written(path, (FIRST, b"{}"), ("store/../../x", b"1")), "not a path inside"),
    "absolute": (lambda path: written(path, (FIRST, b"{}"), ("/tmp/x", b"1")), "not a path inside"),
    "folder": (lambda path: written(path, (FIRST, b"{}"), ("store/x/", b"")), "not a path inside"),
    "bzip2": (lambda path: written(path, (FIRST, b"{}"), packed_by=ZIP_BZIP2), "not compressed with deflate"),
    "encrypted": (encrypted, "is encrypted"),
    "clash": (lambda path: written(path, (FIRST, b"{}"), ("store/a", b"1"), ("store/a/b", b"1")), "cannot be unpacked"),
    "torn": (cut, "cannot be unpacked"),
    "nothing": (lambda path: written(path, ("store/a", b"1")), "no item named"),
    "text": (lambda path: path.write_bytes(b"no zip file"), "cannot be unpacked"),
}


@cases("kind", REFUSED)
def test_what_exceeds_a_bound_is_refused_by_a_sentence(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, bound in {"FREE": 2**20, "MOST_MEMBERS": 10, "LONGEST_RECORD": 2**16}.items():
        monkeypatch.setattr(unpacking, name, bound)
    make, why = REFUSED[kind]
    make(tmp_path / "sent.zip")
    (into := tmp_path / kind).mkdir()
    with pytest.raises(ValueError, match=why):
        unpack(tmp_path / "sent.zip", into, FIRST, ("store", "grader"))
    assert not [path for path in into.rglob("*") if path.is_symlink() or path.stat().st_size > 2**20]
    with pytest.raises(BadBundle, match="is not a bundle of Cairn"):
        check(tmp_path / "sent.zip")


def test_nothing_is_written_for_which_the_disk_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "sent.zip", (FIRST, b"{}"), ("store/a", bytes(100)))
    monkeypatch.setattr(unpacking.shutil, "disk_usage", lambda folder: SimpleNamespace(free=50))
    with pytest.raises(ValueError, match="50 are free: set TMPDIR"):
        unpack(tmp_path / "sent.zip", tmp_path, FIRST, ("store",))
    assert not (tmp_path / "store").exists()


def test_a_member_gives_no_more_bytes_than_it_says(tmp_path: Path) -> None:
    path = written(tmp_path / "sent.zip", (FIRST, b"{}"), ("store/a", bytes(2**20)))
    data = bytearray(path.read_bytes())
    for header, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        begin = data.rindex(header) + at
        data[begin : begin + 4] = (10).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ValueError, match="cannot be unpacked"):
        unpack(path, tmp_path, FIRST, ("store",))
    assert (tmp_path / "store/a").stat().st_size <= 10


def test_what_keeps_to_them_is_unpacked(tmp_path: Path) -> None:
    members = [("store/runs/r/run.json", b"{}"), ("store/runs/r/x.parquet", bytes(1000)), ("grader/g.py", b"1")]
    written(tmp_path / "sent.zip", (FIRST, b"first"), *members)
    assert unpack(tmp_path / "sent.zip", tmp_path, FIRST, ("store", "grader")) == b"first"
    assert [(tmp_path / name).read_bytes() for name, _ in members] == [data for _, data in members]
    assert LONGEST_RECORD > 2**20
