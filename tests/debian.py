"""Debian packages for a test, without installing anything: downloaded with apt and unpacked into a folder that is kept.

Needs Debian or Ubuntu; needs no root rights.
"""

import fcntl
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_DEADLINE = 120.0


def unpacked(packages: Sequence[str], folder: Path) -> Path:
    """Download and unpack those of the packages, and of what they need, that are not installed, once; return the folder
    that stands for `/`. Raises RuntimeError where apt does not know them or cannot download them."""
    root = folder / "root"
    if root.exists():
        return root
    if not shutil.which("apt-get"):
        raise RuntimeError(f"{', '.join(packages)} come with apt-get (Debian or Ubuntu), which is not here")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests of several processes may want the same packages at once
        if not root.exists():
            _unpack(packages, folder, root)
    return root


def _unpack(packages: Sequence[str], folder: Path, root: Path) -> None:
    # Lists may be missing or out of date. Without root rights they stay as they are, which may do.
    subprocess.run(["apt-get", "update", "-qq"], capture_output=True, timeout=_DEADLINE)
    install = ["apt-get", "install", "--simulate", "--no-install-recommends", *packages]
    plan = subprocess.run(install, capture_output=True, text=True, timeout=_DEADLINE)
    if plan.returncode:
        raise RuntimeError(f"apt does not know {', '.join(packages)}, try `apt-get update`: {plan.stderr.strip()}")
    missing = [line.split()[1] for line in plan.stdout.splitlines() if line.startswith("Inst ")]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        downloads, fresh = Path(scratch, "downloads"), Path(scratch, "root")
        downloads.mkdir()
        fetch = ["apt-get", "download", "-qq", *missing]
        fetched = subprocess.run(fetch, cwd=downloads, capture_output=True, text=True, timeout=10 * _DEADLINE)
        if fetched.returncode:
            raise RuntimeError(f"apt could not download {', '.join(missing)}: {fetched.stderr.strip()}")
        for package in downloads.iterdir():
            subprocess.run(["dpkg", "--extract", package, fresh], check=True, timeout=_DEADLINE)
        fresh.rename(root)
