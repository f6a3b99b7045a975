"""The file that a command writes beside what it prints, where `--write` asks for one."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.flows.cli.app import BadInput, writing

if TYPE_CHECKING:
    import pyarrow as pa


def require_free(file: Path) -> None:
    """Raise BadInput unless a new file can be written there."""
    if file.exists():
        raise BadInput(f"{file} is there already: give another name")
    if not file.parent.is_dir():
        raise BadInput(f"{file} cannot be written: there is no folder {file.parent}")
    if not os.access(file.parent, os.W_OK):
        raise BadInput(f"{file} cannot be written: the folder {file.parent} may not be written to")


def write_new(rows: "pa.Table", file: Path) -> None:
    """Write a table, whole or not at all. Raises BadInput where a file has come there, or it cannot be written."""
    from cairn.storage.tables import to_parquet

    with writing(file), tempfile.TemporaryDirectory(prefix=f".{file.name}-", dir=file.parent) as room:
        whole = Path(room) / file.name
        whole.write_bytes(to_parquet(rows))
        try:
            os.link(whole, file)  # unlike a renaming, over nothing
        except FileExistsError:
            require_free(file)
