"""Wrong keys, on a server that checks signatures."""

from dataclasses import replace

import pytest

from cairn.storage.opening import open_store
from cairn.storage.store.errors import StoreRefused
from cairn.storage.store.store import probe
from tests.s3 import S3Server, use_server


def test_wrong_keys_are_refused_and_not_repeated(ceph: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://{ceph.new_bucket()}/prefix"
    for wrong, sentence in (
        (replace(ceph, secret_key="hunter2"), "the secret key is wrong; check AWS_ACCESS_KEY_ID and AWS_SECRET"),
        (replace(ceph, access_key="AKIAEXAMPLE"), "the access key is unknown; check AWS_ACCESS_KEY_ID"),
    ):
        use_server(monkeypatch, wrong)
        for call in (probe, lambda store: store.create("marker", b"x")):
            with pytest.raises(StoreRefused, match=sentence) as caught:
                call(open_store(url))
            assert "hunter2" not in str(caught.value)
            assert "AKIAEXAMPLE" not in str(caught.value)
