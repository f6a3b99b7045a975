"""DuckDB's errors in our words: one sentence, with the names that were perhaps meant."""

import difflib
import re
from collections.abc import Iterable

from cairn.storage.query.views import VIEWS

_NO_COLUMN = re.compile(r'(?:column|named) "([^"]+)"')
_NO_TABLE = re.compile(r"Table with name (\S+) does not exist")


def plain_error(error: Exception, views: frozenset[str] = frozenset()) -> str:
    """What is wrong with a query. `views` are those that it names."""
    first = str(error).strip().partition("\n")[0]
    text = re.sub(r"^\w+(?: \w+)? Error: ", "", first).rstrip("!. ")
    if match := _NO_TABLE.search(text):
        return f"there is no view {match[1]!r}{_nearest(match[1], VIEWS)}; `cairn sql --schema` lists the views"
    if match := _NO_COLUMN.search(text):
        columns = {column for view in views or VIEWS for column in VIEWS[view].columns}
        where = f" in {' or '.join(sorted(views))}" if views else ""
        if match[1] not in columns:
            return f"there is no column {match[1]!r}{where}{_nearest(match[1], columns)}; see `cairn sql --schema`"
    return text


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
