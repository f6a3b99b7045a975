"""Record types that are written into a store, and the environment and code version that produced them."""

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """An immutable record of the ledger."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Environment(Record):
    """Environment in which a step ran. Cairn claims bitwise equality between equal environments only."""

    device: str
    """CPU or GPU model."""
    threads: int
    """CPU threads of the engine that computed the step."""
    host: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of the packages that compute, by package name."""


_DEADLINE = 10.0


class CodeVersion(Record):
    """Version of Cairn."""

    package: str
    """Version of the installed distribution."""
    commit: str | None = None
    """Git commit of the source tree, with `-dirty` where tracked files differ from it; None outside of git."""


@cache
def code_version() -> CodeVersion:
    """Return the version of the code that this process runs."""
    try:
        package = version("cairn-rl")
    except PackageNotFoundError:
        package = "unknown"
    here = Path(__file__).resolve()
    # Cairn may be installed inside another project's repository, whose commit says nothing about Cairn's code.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return CodeVersion(package=package)
    return CodeVersion(package=package, commit=_git(here.parent, "describe", "--always", "--dirty", "--abbrev=40"))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_DEADLINE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
