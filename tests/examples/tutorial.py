"""What the tutorial, or another page, has its reader do, taken from the page."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"


def follow(folder: Path, page: Path = PAGE) -> Iterator[tuple[str, "subprocess.CompletedProcess[str]"]]:
    """Save the files and give the commands of the page in their order, but for `make`: the folder has what that makes.
    Yields each command with how it ended."""
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "configs").symlink_to(ROOT / "configs")
    environment = {name: value for name, value in os.environ.items() if name != "CAIRN_STORE"}
    environment["PATH"] = f"{Path(sys.prefix) / 'bin'}:{environment['PATH']}"
    for token in MarkdownIt("commonmark").parse(page.read_text("utf-8")):
        if token.type != "fence":
            continue
        if "title=" in token.info:
            (folder / token.info.split('"')[1]).write_text(token.content, "utf-8")
        elif not token.info:
            for command in token.content.replace("\\\n", " ").splitlines():
                if not command.startswith("make "):
                    yield (
                        command,
                        subprocess.run(
                            command,
                            shell=True,
                            cwd=folder,
                            env=environment,
                            capture_output=True,
                            text=True,
                            timeout=300,
                        ),
                    )
