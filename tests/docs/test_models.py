"""The page of models against the table that tests fill."""

import re
from pathlib import Path

from tests.model_table import Check, table


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_page_has_a_row_for_every_architecture_and_a_column_for_every_check_and_no_empty_cell() -> None:
    page, written = Path("docs/models.md").read_text().splitlines(), table()
    first = page.index(written[0])
    rows = page[first : first + len(written) + 1]
    assert rows[1] == written[1]
    assert [cells(row)[:2] for row in rows[2:-1]] == [cells(row)[:2] for row in written[2:]]
    assert rows[-1] == ""
    assert all(len(cells(row)) == 2 + len(Check) and all(cells(row)) for row in rows[2:-1])
    conversions = [cells(row)[2] for row in rows[2:-1] if not cells(row)[2].startswith("refused")]
    assert conversions
    for conversion in conversions:
        converted = re.fullmatch(r"(\d+) of (\d+)", conversion)
        assert converted is not None
        assert converted[1] == converted[2]
