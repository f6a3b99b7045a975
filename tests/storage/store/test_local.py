"""What a store on local files does when the disk or the process fails."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.storage.opening import open_store
from cairn.storage.store.errors import StoreError, StoreRefused
from cairn.storage.store.local import LocalStore
from cairn.storage.store.store import probe
from tests.small_disk import small_disk, why_not
from tests.waiting import wait_for


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    if reason := why_not():
        pytest.skip(reason)
    with small_disk(tmp_path / "disk", 2**20) as disk:
        yield disk


def test_no_space_left_is_refused_and_nothing_committed_is_lost(disk: Path) -> None:
    store = open_store(str(disk))
    store.write("file", b"kept")
    with pytest.raises(StoreRefused, match=r"cannot write .*: no space is left on the device"):
        store.write("file", bytes(2 * 2**20))
    with pytest.raises(StoreRefused, match=r"cannot create .*: no space is left on the device"):
        store.create("marker", bytes(2 * 2**20))
    assert store.read("file") == b"kept"
    assert os.listdir(disk) == ["file"]
    assert store.create("marker", b"fits")


def test_a_read_only_disk_is_refused(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for url in (disk, disk / "below"):
        with pytest.raises(StoreRefused, match="the file system is read-only; choose another store"):
            probe(open_store(str(url)))


def test_a_file_where_the_root_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for url in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreRefused, match="choose another store"):
            probe(open_store(str(url)))


def test_a_folder_that_may_not_be_written_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        # Root may write anywhere, so the probing process becomes somebody else.
        code = f"""
import os
from cairn.storage.opening import open_store; from cairn.storage.store.store import probe
store = open_store({folder!r})
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
probe(store)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert f"StoreRefused: cannot create {folder}/probe-" in done.stderr
    assert "permission is denied; check the folder's owner and mode" in done.stderr


def test_relative_folders_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(".")
    monkeypatch.chdir("/")
    store.write("file", b"x")
    assert store.url == str(tmp_path)
    assert (tmp_path / "file").exists()


def test_an_unknown_kind_of_store_is_refused() -> None:
    with pytest.raises(StoreRefused, match="give a folder or s3://bucket/prefix"):
        open_store("gs://bucket/prefix")


_WRITER = """
import sys
from cairn.storage.opening import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
for number in range(10**9):
    store.write("replaced", bytes([number % 256]) * 2**20)
    store.create(f"created/{number:06d}", bytes([number % 256]) * 2**18)
"""


@pytest.mark.proof
def test_a_killed_writer_leaves_whole_files_only(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for _ in range(3):
        before = len(store.list("created"))
        with subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            try:
                wait_for(lambda before=before: len(store.list("created")) > before)
            finally:
                writer.send_signal(signal.SIGKILL)
        replaced = store.read("replaced")
        assert len(replaced) == 2**20
        assert len(set(replaced)) == 1
    for path, size in store.find("created").items():
        assert size == 2**18
        assert len(set(store.read(path))) == 1


def test_a_temporary_file_that_someone_removes_is_an_error_that_a_new_try_mends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(str(tmp_path))
    (tmp_path / "source").write_bytes(b"x")

    def lose(*written: object) -> None:
        for file in tmp_path.rglob(".*.tmp"):
            file.unlink()

    for method in ("_write_synced", "_copy_synced"):
        monkeypatch.setattr(f"cairn.storage.store.local.{method}", lose)
    for write in (
        lambda: store.write("file", b"x"),
        lambda: store.create("file", b"x"),
        lambda: store.put_file(tmp_path / "source", "file"),
    ):
        with pytest.raises(StoreError, match=r"cannot (write|create) .*file: No such file"):
            write()
