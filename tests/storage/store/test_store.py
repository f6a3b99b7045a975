"""The promises of `cairn.storage.store.store.Store`, on every kind of store."""

import gc
import hashlib
import os
import pickle
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from cairn.storage.opening import open_store
from cairn.storage.store.errors import NoSpace
from cairn.storage.store.store import Store, probe
from tests.small_disk import small_disk, why_not
from tests.tiers import Tier

pytestmark = pytest.mark.contract(tier=Tier.QUICK)


def test_reads_back_what_was_written_and_replaces_it(store: Store) -> None:
    store.write("a/b/file", b"old")
    store.write("a/b/file", b"")
    assert store.read("a/b/file") == b""
    store.write("a/b/file", b"new\x00\xff")
    assert store.read("a/b/file") == b"new\x00\xff"


def test_absent_files_are_file_not_found(store: Store, tmp_path: Path) -> None:
    store.write("folder/file", b"x")
    for path in ("absent", "folder", "folder/file/below"):
        with pytest.raises(FileNotFoundError):
            store.read(path)
        with pytest.raises(FileNotFoundError):
            store.sha256(path)
        with pytest.raises(FileNotFoundError):
            store.get_file(path, tmp_path / "copy")
        assert not store.exists(path)
        store.delete("absent")
    assert not (tmp_path / "copy").exists()


def test_only_the_first_create_wins(store: Store) -> None:
    assert store.create("folder/marker", b"first")
    assert not store.create("folder/marker", b"second")
    assert store.read("folder/marker") == b"first"


def test_of_racing_creators_exactly_one_wins(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        for race in range(4):
            contents = [f"{race} {creator}".encode() for creator in range(8)]
            won = list(pool.map(lambda content, race=race: store.create(f"race-{race}", content), contents))
            assert won.count(True) == 1
            assert store.read(f"race-{race}") == contents[won.index(True)]


def test_an_empty_create_is_refused_because_stores_ignore_its_condition(store: Store) -> None:
    with pytest.raises(ValueError, match="cannot create"):
        store.create("marker", b"")


def test_list_gives_direct_children_and_find_everything_below(store: Store) -> None:
    for path, data in (("top/b", b"1"), ("top/a/x", b"22"), ("top/a/y/z", b"333"), ("topmost", b"4444")):
        store.write(path, data)
    assert store.list("top") == ["a/", "b"]
    assert store.list("top/a") == ["x", "y/"]
    assert store.list("nowhere") == []
    assert store.find("top") == {"top/a/x": 2, "top/a/y/z": 3, "top/b": 1}
    assert store.find("nowhere") == {}
    store.delete("top/b")
    assert store.list("top") == ["a/"]
    assert not store.exists("top/b")


def test_big_files_come_back_with_their_digest(store: Store, tmp_path: Path) -> None:
    data = random.Random(0).randbytes(40 * 2**20 + 7)
    (tmp_path / "big").write_bytes(data)
    store.put_file(tmp_path / "big", "folder/big")
    store.get_file("folder/big", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data
    assert store.sha256("folder/big") == (len(data), hashlib.sha256(data).hexdigest())
    assert sorted(os.listdir(tmp_path)) == ["big", "copy"]


def test_paths_cannot_leave_the_root(store: Store) -> None:
    for path in ("../x", "a/../../x", "/etc/passwd", "a//b", "a/./b", "", "a\\b", "a\nb"):
        with pytest.raises(ValueError, match="not a path inside a store"):
            store.write(path, b"x")
        with pytest.raises(ValueError, match="not a path inside a store"):
            store.read(path)


def test_a_pickled_store_opens_connections_of_its_own(store: Store) -> None:
    store.write("file", b"x")
    copy = pickle.loads(pickle.dumps(store))
    assert copy.read("file") == b"x"
    assert open_store(store.url).read("file") == b"x"


def test_a_store_that_nobody_holds_any_more_is_gone_with_its_connections(store: Store) -> None:
    opened = open_store(store.url)
    opened.write("file", b"x")
    references = [weakref.ref(opened), *(weakref.ref(value) for value in vars(opened).values() if is_connection(value))]
    assert len(references) == 2
    del opened
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def is_connection(value: object) -> bool:
    """Whether it is what a store reaches its files by: a client, or threads."""
    return isinstance(value, (S3FileSystem, ThreadPoolExecutor))


def test_the_probe_accepts_the_store_and_leaves_nothing_behind(store: Store) -> None:
    store.write("folder/file", b"x")
    probe(store)
    root, _, folder = store.url.rpartition("/")
    assert open_store(root).find(folder) == {f"{folder}/folder/file": 1}


def test_a_page_begins_after_the_name_given_and_says_whether_there_are_more(store: Store) -> None:
    for name in ("000001/a", "000002/b", "000003/c/d", "file"):
        store.write(f"folder/{name}", b"x")
    assert store.page("folder", "") == (["000001/", "000002/", "000003/", "file"], False)
    assert store.page("folder", "000002") == (["000002/", "000003/", "file"], False)
    assert store.page("folder", "000002/") == (["000003/", "file"], False)
    assert store.page("folder", "file") == ([], False)
    assert store.page("nothing", "000001") == ([], False)


def test_only_folders_without_files_are_removed(store: Store) -> None:
    for path in ("runs/a/b/one", "runs/a/two"):
        store.write(path, b"x")
    store.delete("runs/a/b/one")
    store.remove_empty_folders("runs")
    assert store.list("runs/a") == ["two"]
    store.delete("runs/a/two")
    store.remove_empty_folders("runs")
    assert store.list("runs") == []
    assert store.unfinished("runs") == []


def test_a_disk_that_is_full_is_named_by_whoever_fetches_a_file_to_it(store: Store, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    store.write("file", bytes(2 * 2**20))
    with small_disk(tmp_path / "disk", 2**20) as disk:
        with pytest.raises(NoSpace, match=f"cannot write to {disk}: no space is left there; free some"):
            store.get_file("file", disk / "copy")
        assert not os.listdir(disk)


def test_many_files_are_deleted_at_once_whether_they_exist_or_not(store: Store) -> None:
    paths = [f"runs/r/parts/{number:04d} &<é>.arrow" for number in range(1005)]
    for path in (*paths[:3], *paths[-3:], "runs/r/kept"):
        store.write(path, b"x")
    store.delete_many(paths)
    store.delete_many([])
    assert store.find("runs") == {"runs/r/kept": 1}
