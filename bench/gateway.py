"""The object store of benchmarks that measure one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.ceph.rgw import gateway, prepare_packages

STORE_HELP = "s3://bucket/prefix to measure, instead of a Ceph gateway that is started for it"


@contextmanager
def bucket(url: str | None) -> Iterator[str]:
    """Yield a store's address: the one passed, or a fresh bucket of a Ceph gateway on this machine, which ends with the
    block (see tests/ceph/rgw.py)."""
    if url is not None:
        yield url
        return
    with gateway(prepare_packages()) as server:
        os.environ.update(server.env)
        yield f"s3://{server.new_bucket()}/bench"
