"""A replacement for `uv` that gives `verifiers` the Python which runs one of its programs.

A program lists the packages that it needs. This Python is used where it has all of them, so that nothing is downloaded;
otherwise the command goes to the real uv, if there is one.
"""

import os
import re
import shutil
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

_BLOCK = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
"""The inline script metadata of PEP 723."""
_NAME = "uv"


def put_on_path() -> None:
    """Put this program on PATH as `uv`, in front of any other, for child processes."""
    folder = Path(tempfile.mkdtemp(prefix="cairn-uv-"))
    file = folder / _NAME
    here = Path(__file__).resolve()
    file.write_text(f'#!/bin/sh\nexec {sys.executable} -I {here} {folder} "$@"\n')
    file.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])


def main(folder: str, arguments: list[str]) -> None:
    """Run `uv sync --script FILE` and `uv python find --script FILE`; pass all other commands to the real uv."""
    command = next((words for words in (["sync"], ["python", "find"]) if arguments[: len(words)] == words), None)
    if command is not None and "--help" in arguments:
        print("--script")
        return
    if command is not None and "--script" in arguments and _has_all(arguments[arguments.index("--script") + 1]):
        if command != ["sync"]:
            print(sys.executable)
        return
    path = os.pathsep.join(one for one in os.environ["PATH"].split(os.pathsep) if one != folder)
    uv = shutil.which(_NAME, path=path)
    if uv is None:
        sys.exit(f"{' '.join(arguments)}: this Python lacks packages of the program, and uv is not installed")
    os.execve(uv, [uv, *arguments], {**os.environ, "PATH": path})


def _has_all(program: str) -> bool:
    block = _BLOCK.search(Path(program).read_text())
    if block is None:
        return True
    lines = (line[2:] if line.startswith("# ") else line[1:] for line in block["content"].splitlines())
    return all(map(_has, tomllib.loads("\n".join(lines)).get("dependencies", [])))


def _has(wanted: str) -> bool:
    from packaging.requirements import Requirement

    requirement = Requirement(wanted)
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
