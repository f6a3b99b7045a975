"""A Ceph object gateway on this machine, from the distribution's packages, without installing anything.

The packages that are missing here are downloaded with apt (about 70 MB), unpacked into a folder that is kept, and run
from there: one monitor, one OSD in memory, one gateway on a free port. Needs Debian or Ubuntu; needs no root rights.

`python -m tests.ceph.rgw` prepares the packages, starts a gateway, says how long each part took, and stops it.
"""

import ctypes
import os
import platform
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.debian import unpacked
from tests.s3 import S3Server

PACKAGES = Path(__file__).parents[2] / "build" / "ceph"
"""Where the unpacked packages are kept."""
_NAMES = ["radosgw", "ceph-mon", "ceph-osd", "ceph-common"]
_KEY, _SECRET = "testkey0", "testsecret0"
_DEADLINE = 120.0
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG

_CONFIGURATION = """
[global]
fsid = {fsid}
mon initial members = a
mon host = [v2:127.0.0.1:{mon_v2}/0,v1:127.0.0.1:{mon_v1}/0]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms type = async+posix
osd objectstore = memstore
memstore device bytes = 4294967296
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd class dir = {lib}/rados-classes
osd class load list = *
osd class default list = *
plugin dir = {lib}/ceph
erasure code dir = {lib}/ceph/erasure-code
mon allow pool size one = true
mon max pg per osd = 1000
mon data = {folder}/mon
mon cluster log file = /dev/null
osd data = {folder}/osd
rgw data = {folder}/rgw
keyring = {folder}/keyring
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
pid file = {folder}/$name.pid
setuser match path = {folder}
paxos propose interval = 0.05
paxos min wait = 0.01
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{rgw} tcp_nodelay=1
rgw dns name = localhost
"""


def prepare_packages(folder: Path = PACKAGES) -> Path:
    """Download and unpack what is missing, once; return the folder that stands for `/`."""
    return unpacked(_NAMES, folder)


@contextmanager
def gateway(root: Path) -> Iterator[S3Server]:
    """A fresh, empty object store that lives as long as the block, and never longer than this process."""
    with tempfile.TemporaryDirectory() as scratch:
        cluster = _Cluster(root, Path(scratch))
        try:
            cluster.start()
            yield S3Server(f"http://127.0.0.1:{cluster.port}", _KEY, _SECRET)
        finally:
            cluster.stop()


class _Cluster:
    def __init__(self, root: Path, folder: Path):
        self._root = root
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        libraries = root / "usr" / "lib" / f"{platform.machine()}-linux-gnu"
        self._env = {
            "PATH": f"{root}/usr/bin:/usr/bin:/bin",
            "LD_LIBRARY_PATH": f"{libraries}:{root}/lib/{libraries.name}:{libraries}/ceph",
            "PYTHONPATH": f"{root}/usr/lib/python3/dist-packages",
            "CEPH_CONF": str(folder / "ceph.conf"),
        }
        self._ports = dict(zip(("mon_v2", "mon_v1", "rgw"), _free_ports(3), strict=True))
        self.port = self._ports["rgw"]
        self._fsid = str(uuid.uuid4())
        configuration = _CONFIGURATION.format(fsid=self._fsid, folder=folder, lib=libraries, **self._ports)
        (folder / "ceph.conf").write_text(configuration)

    def start(self) -> None:
        for name in ("mon", "osd", "rgw"):
            (self._folder / name).mkdir()
        keyring, monmap = self._folder / "keyring", self._folder / "monmap"
        self._run(
            "ceph-authtool", "--create-keyring", keyring, "--gen-key", "--name", "mon.", "--cap", "mon", "allow *"
        )
        addresses = f"[v2:127.0.0.1:{self._ports['mon_v2']},v1:127.0.0.1:{self._ports['mon_v1']}]"
        self._run("monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", addresses, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._daemon("ceph-mon", "-f", "-i", "a")
        osd = str(uuid.uuid4())
        self._run("/usr/bin/python3", self._root / "usr/bin/ceph", "osd", "new", osd, "0")
        self._run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", osd)
        self._daemon("ceph-osd", "-f", "-i", "0")
        # The gateway demands authentication by itself, whatever the configuration file says.
        self._daemon("radosgw", "-f", "-n", "client.rgw", "--auth_client_required=none", "--ms_mon_client_mode=crc")
        self._wait_for_gateway()
        user = ["--uid", "test", "--display-name", "test", "--access-key", _KEY, "--secret-key", _SECRET]
        self._run("radosgw-admin", "user", "create", *user)

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGKILL)
            daemon.wait(timeout=_DEADLINE)

    def _run(self, *command: str | Path) -> None:
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=_DEADLINE)
        if done.returncode:
            raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr.strip()[-2000:]}")

    def _daemon(self, *command: str) -> None:
        with open(self._folder / f"{command[0]}.out", "wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self._env,
                    stdout=output,
                    stderr=output,
                    preexec_fn=_die_with_parent,
                )
            )

    def _wait_for_gateway(self) -> None:
        deadline = time.monotonic() + _DEADLINE
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=5).close()
                return
            except (OSError, urllib.error.URLError) as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the Ceph gateway did not answer in {_DEADLINE:.0f} s: {error}") from None
            for daemon in self._daemons:
                if daemon.poll() is not None:
                    raise RuntimeError(f"{daemon.args[0]} ended with {daemon.returncode}")  # type: ignore[index]
            time.sleep(0.1)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def main() -> None:
    """Time the parts of the set-up."""
    began = time.perf_counter()
    root = prepare_packages()
    prepared = time.perf_counter()
    with gateway(root) as server:
        started = time.perf_counter()
        server.new_bucket()
        print(f"packages {prepared - began:.1f} s, start {started - prepared:.1f} s, in {os.path.relpath(root)}")


if __name__ == "__main__":
    main()
