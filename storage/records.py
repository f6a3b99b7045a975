"""Values that are written into a store, and what computed them."""

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """A frozen value of the ledger."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Environment(Record):
    """Where a step ran. Bitwise equality is claimed between equal environments only."""

    device: str
    """Type of the machine: CPU or GPU model."""
    threads: int
    """CPU threads of the engine that computed."""
    host: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    """Of the packages that compute, by name."""


_DEADLINE = 10.0


class CodeVersion(Record):
    """Version of Cairn."""

    package: str
    """Of the installed distribution."""
    commit: str | None = None
    """Git commit of the source tree, with `-dirty` where tracked files differ from it; None outside of git."""


@cache
def code_version() -> CodeVersion:
    """The version of the code that this process runs."""
    try:
        package = version("cairn-rl")
    except PackageNotFoundError:
        package = "unknown"
    here = Path(__file__).resolve()
    # An installation inside of someone's own repository is not that repository's code.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return CodeVersion(package=package)
    return CodeVersion(package=package, commit=_git(here.parent, "describe", "--always", "--dirty", "--abbrev=40"))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_DEADLINE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
