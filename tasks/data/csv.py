"""Data source `csv`: rows of a CSV file at any fsspec URL. The first line names the columns; every value is text."""

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from cairn.configs.errors import BadData
from cairn.tasks.data.files import open_file


def rows(path: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows. Raises BadData where the file is missing, is not text, or is torn."""
    with io.TextIOWrapper(open_file(path, (".csv",)), "utf-8-sig", newline="") as text:
        try:
            for number, row in enumerate(csv.DictReader(text, strict=True), 1):
                if None in row or None in row.values():
                    raise BadData(f"{path}, row {number} has more or fewer values than there are columns")
                yield row
        except (csv.Error, UnicodeDecodeError) as error:
            raise BadData(f"{path} is not a CSV file ({error}): correct it") from None
