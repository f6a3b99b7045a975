"""Fixtures with an S3 server: moto, over real HTTP, in a process of its own.

`s3_server` is the server of the whole session, `s3_url` a store's address in a fresh bucket on it, with the environment
set so that `open_store(s3_url)` and child processes reach it.
"""

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import s3fs

_MOTO = """
import sys
from threading import Lock
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer
from werkzeug.serving import WSGIRequestHandler
WSGIRequestHandler.disable_nagle_algorithm = True  # else many replies wait 40 ms for an acknowledgement
put, one_at_a_time = S3Response.put_object, Lock()
def put_alone(self):  # moto looks for the key and stores it later: two of its threads could both create it
    with one_at_a_time:
        return put(self)
S3Response.put_object = put_alone
server = ThreadedMotoServer(ip_address=sys.argv[1], port=0, verbose=False)
server.start()
print("%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()  # ends with the test process, however that ends
server.stop()
"""


@dataclass(frozen=True)
class S3Server:
    """Where an S3 server answers, and to whom."""

    endpoint: str
    access_key: str
    secret_key: str

    @property
    def env(self) -> dict[str, str]:
        """Environment variables with which `open_store("s3://…")` reaches this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @cached_property
    def client(self) -> s3fs.S3FileSystem:
        """A connection beside the store's own, for what tests do behind its back."""
        return s3fs.S3FileSystem(
            endpoint_url=self.endpoint,
            key=self.access_key,
            secret=self.secret_key,
            client_kwargs={"region_name": "us-east-1"},
            config_kwargs={"request_checksum_calculation": "when_required"},
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def new_bucket(self) -> str:
        """Create a bucket and return its name."""
        bucket = f"test-{uuid.uuid4().hex}"
        self.client.call_s3("create_bucket", Bucket=bucket)
        return bucket


def use_server(monkeypatch: pytest.MonkeyPatch, server: S3Server) -> None:
    """Point the environment of this process and its children at the server."""
    s3fs.S3FileSystem.clear_instance_cache()  # others may have been made under another environment
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)


@contextmanager
def moto_server(at: str = "127.0.0.1", start: Callable[..., Any] = subprocess.Popen, **env: str) -> Iterator[S3Server]:
    """A moto server that lives as long as the block, at an address, with further environment variables. `start` starts
    its process, as Popen does."""
    with start(
        [sys.executable, "-c", _MOTO, at],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | env,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "moto did not start"
        yield S3Server(f"http://{address}", "testkey", "testsecret")
        process.stdin.close()
        process.wait(timeout=120)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """The session's moto server."""
    with moto_server() as server:
        yield server


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of a store in a fresh bucket of `s3_server`."""
    use_server(monkeypatch, s3_server)
    return f"s3://{s3_server.new_bucket()}/some/prefix"
