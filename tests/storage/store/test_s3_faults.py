"""What a store on S3 does when the network, the server or the person misbehaves."""

import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.storage.store import s3
from cairn.storage.store.errors import LeaseLost, StoreError, StoreRefused
from cairn.storage.store.s3 import S3Store
from cairn.storage.store.store import probe
from tests.faulty_s3 import Fault, FaultyProxy, faulty_proxy, proxy_process
from tests.s3 import S3Server, moto_server, use_server
from tests.storage.builders import commit_step
from tests.waiting import wait_for


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def faulty_store(s3_server: S3Server, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    use_server(monkeypatch, replace(s3_server, endpoint=proxy.endpoint))
    return S3Store(f"s3://{s3_server.new_bucket()}/prefix")


def test_a_store_that_ignores_the_condition_is_refused(faulty_store: S3Store, proxy: FaultyProxy) -> None:
    probe(faulty_store)
    proxy.dropped_header = "if-none-match"
    with pytest.raises(StoreRefused, match="lets a second writer create a file that exists"):
        probe(faulty_store)


def test_a_create_whose_reply_was_lost_has_won(faulty_store: S3Store, proxy: FaultyProxy) -> None:
    proxy.plan = lambda method, path: Fault.LOSE_REPLY if method == "PUT" and not proxy.happened else None
    assert faulty_store.create("marker", b"mine")
    assert proxy.happened == {Fault.LOSE_REPLY: 1}
    assert proxy.requests["PUT"] == 2
    assert not faulty_store.create("marker", b"other")


@pytest.mark.proof
def test_nothing_is_lost_or_torn_under_503s_and_cut_bodies(
    faulty_store: S3Store, proxy: FaultyProxy, tmp_path: Path
) -> None:
    dice = random.Random(0)
    faults = [Fault.UNAVAILABLE] * 10 + [Fault.TRUNCATE] * 10 + [Fault.DROP] * 5 + [None] * 75
    proxy.plan = lambda method, path: dice.choice(faults)
    contents = {f"folder/{number}": dice.randbytes(2000) for number in range(40)}
    big = dice.randbytes(3 * s3._CHUNK)
    (tmp_path / "big").write_bytes(big)

    def write_and_read(path: str) -> bool:
        assert faulty_store.create(path, contents[path])
        return faulty_store.read(path) == contents[path]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(write_and_read, contents))
    faulty_store.put_file(tmp_path / "big", "big")
    faulty_store.get_file("big", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == big
    assert faulty_store.find("folder") == dict.fromkeys(sorted(contents), 2000)
    assert set(proxy.happened) == {Fault.UNAVAILABLE, Fault.TRUNCATE, Fault.DROP}
    assert faulty_store.retries >= 10


def test_uploads_beyond_a_page_are_found(faulty_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"Bucket": faulty_store._bucket}
    began = {
        faulty_store._s3.call_s3("create_multipart_upload", Key=faulty_store._key(f"folder/{n}"), **where)["UploadId"]
        for n in range(5)
    }
    assert {upload.upload for upload in faulty_store.unfinished("folder")} == began
    uploads = sorted(faulty_store.unfinished("folder"), key=lambda upload: upload.path)
    pages = {
        (): {"Uploads": uploads[:2], "IsTruncated": True, "NextKeyMarker": "k2", "NextUploadIdMarker": "u2"},
        ("k2", "u2"): {"Uploads": uploads[2:4], "IsTruncated": True, "NextKeyMarker": "k4", "NextUploadIdMarker": "u4"},
        ("k4", "u4"): {"Uploads": uploads[4:], "IsTruncated": False},
    }
    call = faulty_store._s3.call_s3

    def paged(method: str, *args: object, **options: str) -> dict[str, object]:
        whole = call(method, *args, **{name: value for name, value in options.items() if "Marker" not in name})
        wanted = pages[tuple(options[name] for name in ("KeyMarker", "UploadIdMarker") if name in options)]
        ids = {upload.upload for upload in wanted["Uploads"]}  # type: ignore[attr-defined]
        return {**whole, **wanted, "Uploads": [one for one in whole["Uploads"] if one["UploadId"] in ids]}

    monkeypatch.setattr(faulty_store._s3, "call_s3", paged)
    assert faulty_store.unfinished("folder") == uploads


@pytest.mark.proof
def test_an_outage_is_waited_out(faulty_store: S3Store, proxy: FaultyProxy) -> None:
    faulty_store.write("file", b"old")  # opens the connection
    began = time.monotonic()
    proxy.outage(3)
    faulty_store.write("file", b"x")
    assert time.monotonic() - began > 3
    assert faulty_store.read("file") == b"x"
    assert proxy.happened[Fault.OUTAGE] >= 1


@pytest.mark.proof
def test_a_server_that_accepts_and_never_answers_is_asked_again_and_at_last_given_up(
    faulty_store: S3Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_READ_TIMEOUT", 0.5)
    proxy.plan = lambda method, path: Fault.HANG if method == "PUT" and not proxy.happened else None
    assert faulty_store.create("marker", b"mine")
    assert faulty_store.read("marker") == b"mine"
    assert proxy.happened == {Fault.HANG: 1}

    monkeypatch.setattr(s3, "RETRY_DEADLINE", 1.0)
    proxy.plan = lambda method, path: Fault.HANG
    began = time.monotonic()
    with pytest.raises(StoreError, match="does not respond at marker: ReadTimeoutError"):
        faulty_store.read("marker")
    assert time.monotonic() - began < 50, "the proxy lets go after 60"


@pytest.mark.slow
def test_a_proxy_process_is_controlled_from_outside(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with proxy_process(s3_server.endpoint) as proxy:
        use_server(monkeypatch, replace(s3_server, endpoint=proxy.endpoint))
        store = S3Store(f"s3://{s3_server.new_bucket()}/prefix")
        store.write("file", b"x")
        assert proxy.control() == {}
        proxy.control(rates={"unavailable": 0.3}, outage=3)
        assert [store.read("file") for _ in range(20)] == [b"x"] * 20
        assert set(proxy.control()) == {Fault.UNAVAILABLE, Fault.OUTAGE}


@pytest.mark.slow
def test_a_run_of_a_thousand_iterations_and_more_is_found_in_three_requests(
    faulty_store: S3Store, proxy: FaultyProxy
) -> None:
    paths = [layout.commit("run-1", iteration, Step.TRAIN) for iteration in range(1005)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda path: faulty_store.write(path, b"x"), paths))
    ledger = Ledger.create(faulty_store, "run-1", {})
    proxy.requests.clear()
    assert ledger.last_iteration() == 1004
    assert proxy.requests == {"GET": 3}
    assert len(faulty_store.find(layout.iterations("run-1"))) == 1005


@pytest.mark.slow
def test_retries_are_bounded(faulty_store: S3Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "RETRY_DEADLINE", 1.0)
    proxy.plan = lambda method, path: Fault.UNAVAILABLE
    with pytest.raises(StoreError, match=r"failed at file: HTTP 503") as caught:
        faulty_store.write("file", b"x")
    assert not isinstance(caught.value, StoreRefused)
    assert proxy.happened[Fault.UNAVAILABLE] <= 8


@pytest.mark.slow
def test_an_endpoint_out_of_reach_is_refused_at_start(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        use_server(monkeypatch, replace(s3_server, endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}"))
        began = time.monotonic()
        with pytest.raises(StoreRefused, match=r"does not respond.*check AWS_ENDPOINT_URL"):
            probe(open_store("s3://bucket/prefix"))
    assert time.monotonic() - began < s3.RETRY_DEADLINE


def test_a_missing_bucket_is_refused(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_server(monkeypatch, s3_server)
    store = open_store("s3://no-such-bucket/prefix")
    for call in (lambda: probe(store), lambda: store.write("file", b"x"), lambda: store.read("file")):
        with pytest.raises(StoreRefused, match="there is no such bucket; create it or name another"):
            call()


def test_missing_keys_are_refused(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_server(monkeypatch, s3_server)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(StoreRefused, match="AWS_ACCESS_KEY_ID"):
        probe(open_store("s3://bucket/prefix"))


@pytest.mark.slow
def test_wrong_keys_are_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    with moto_server(INITIAL_NO_AUTH_ACTION_COUNT="0") as server:
        use_server(monkeypatch, replace(server, access_key="AKIAEXAMPLE", secret_key="hunter2"))
        with pytest.raises(StoreRefused, match="the access key is unknown; check AWS_ACCESS_KEY_ID") as caught:
            probe(open_store("s3://bucket/prefix"))
    assert "hunter2" not in str(caught.value)
    assert "AKIAEXAMPLE" not in str(caught.value)


def test_keys_in_the_address_are_refused_and_not_repeated() -> None:
    with pytest.raises(StoreRefused, match="must not contain keys") as caught:
        open_store("s3://AKIAEXAMPLE:hunter2@bucket/prefix")
    assert "hunter2" not in str(caught.value)
    assert "AKIAEXAMPLE" not in str(caught.value)


@pytest.mark.proof
def test_a_driver_that_is_taken_over_while_it_tries_a_commit_again_commits_nothing(
    faulty_store: S3Store, proxy: FaultyProxy
) -> None:
    ledger = Ledger.create(faulty_store, "run-1", {})
    ledger.acquire()
    proxy.plan = lambda method, path: Fault.UNAVAILABLE if method == "PUT" and path.endswith("sync.json") else None
    with ThreadPoolExecutor(1) as pool:
        committing = pool.submit(commit_step, ledger, 0, Step.SYNC)
        wait_for(lambda: proxy.happened)
        successor = Ledger.open(faulty_store, "run-1")
        successor.acquire(takeover=True)
        on_the_way = proxy.happened.total() + 1  # when the run was taken over
        wait_for(lambda: committing.done() or proxy.happened.total() > on_the_way)
        proxy.plan = lambda method, path: None
        with pytest.raises(LeaseLost, match="was taken over by"):
            committing.result(60)
    assert successor.find(0, Step.SYNC) is None


@pytest.mark.proof
def test_no_try_at_a_creation_is_sent_without_a_look_at_its_guard(faulty_store: S3Store, proxy: FaultyProxy) -> None:
    faulty_store.write("file", b"x")
    puts = proxy.requests["PUT"]
    proxy.plan = lambda method, path: (
        Fault.UNAVAILABLE if method == "PUT" and proxy.happened.total() < s3._REQUEST_ATTEMPTS else None
    )
    looked = []
    assert faulty_store.create("marker", b"mine", lambda: looked.append(proxy.requests["PUT"] - puts))
    assert looked == list(range(s3._REQUEST_ATTEMPTS + 1))
    assert faulty_store.retries == s3._REQUEST_ATTEMPTS


def test_a_creation_of_someone_else_is_not_mistaken_for_ones_own_after_a_lost_reply(
    faulty_store: S3Store, proxy: FaultyProxy
) -> None:
    assert faulty_store.create("marker", b"theirs")
    proxy.plan = lambda method, path: Fault.LOSE_REPLY if method == "PUT" and proxy.happened.total() < 3 else None
    assert not faulty_store.create("marker", b"mine")
    assert proxy.happened.total() >= 1
    assert faulty_store.read("marker") == b"theirs"


@pytest.mark.slow
def test_every_request_that_is_tried_again_is_counted(faulty_store: S3Store, proxy: FaultyProxy) -> None:
    broken = 2 * s3._REQUEST_ATTEMPTS + 2  # more than one operation's; aiohttp breaks two for a request
    proxy.plan = lambda method, path: Fault.DROP if proxy.happened.total() < broken else None
    faulty_store.write("file", b"x")
    assert proxy.happened == {Fault.DROP: broken}
    assert faulty_store.retries == broken / 2
    proxy.plan = lambda method, path: Fault.UNAVAILABLE if proxy.happened[Fault.UNAVAILABLE] < 2 else None
    faulty_store.write("file", b"x")
    assert faulty_store.retries == broken / 2 + 2
