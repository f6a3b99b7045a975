"""Debian packages for a test, without installing anything: downloaded with apt and unpacked into a folder that stays.

Needs Debian or Ubuntu; needs no root rights.
"""

import fcntl
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_DEADLINE = 120.0
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


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


def newest(package: str, folder: Path) -> Path:
    """The same for one package as Debian's unstable suite has it, without what it needs: for static programs that the
    installed suite has too old. Raises RuntimeError where it cannot be had."""
    root = folder / "root"
    if root.exists():
        return root
    if not shutil.which("apt-get") or not _KEYRING.exists():
        raise RuntimeError(f"{package} comes with apt-get and Debian's keys, which are not here")
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    sources = folder / "unstable.list"
    sources.write_text(f"deb [signed-by={_KEYRING}] http://deb.debian.org/debian unstable main\n")
    options = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": folder / "lists",
        "Dir::Cache": folder / "cache",
    }
    apt = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for command in ("update", "download"):
            words = [*apt, command] if command == "update" else [*apt, command, package]
            done = subprocess.run(words, cwd=scratch, capture_output=True, text=True, timeout=5 * _DEADLINE)
        if done.returncode:
            raise RuntimeError(f"apt could not download {package}: {done.stderr.strip()}")
        fresh = Path(scratch, "root")
        subprocess.run(["dpkg", "--extract", *Path(scratch).glob("*.deb"), fresh], check=True, timeout=_DEADLINE)
        fresh.rename(root)
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
