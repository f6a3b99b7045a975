"""Rows of a CSV file at any fsspec URL, with the names of the columns in its first line; every value is text."""

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from cairn.configs.errors import BadData
from cairn.tasks.data.files import open_file


def rows(path: str) -> Iterator[Mapping[str, Any]]:
    """Row after row. Raises BadData where the file is missing, no text, or torn."""
    with io.TextIOWrapper(open_file(path, (".csv",)), "utf-8-sig", newline="") as text:
        try:
            for number, row in enumerate(csv.DictReader(text, strict=True), 1):
                if None in row or None in row.values():
                    raise BadData(f"{path}, row {number} has another number of values than there are columns")
                yield row
        except (csv.Error, UnicodeDecodeError) as error:
            raise BadData(f"{path} is no CSV file ({error}): correct it") from None
