"""The page: one HTML file with all that it shows, which asks nobody for anything.

What a run holds may be hostile. Text in the page's own markup is escaped; all else lies packed in base64 and reaches
the page as text nodes. The page's policy runs the scripts that it came with, by their digests, and no other; it loads
nothing and sends nothing.
"""

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from cairn.flows.report.facts import duration

_HERE = Path(__file__).parent
_LIBRARIES = ("uPlot.iife.min.js", "tabulator.min.js")
_LIBRARY_STYLES = ("uPlot.min.css", "tabulator_simple.min.css")
_SCRIPTS = ("decode.js", "text.js", "curves.js", "tokens.js", "reader.js", "samples.js", "main.js")
_SOURCE_MAP = re.compile(r"^(//# sourceMappingURL=.*|/\*# sourceMappingURL=.*\*/)$", re.MULTILINE)
"""A browser's developer tools would ask for it."""
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""What cannot be seen or would move what stands around it, as in `assets/text.js`."""


def write_page(facts: Mapping[str, Any], blocks: Mapping[str, bytes]) -> Iterator[bytes]:
    """The page in pieces.

    Args:
        facts: what the template shows.
        blocks: packed columns, by the names under which the scripts ask for them.
    """
    own = "\n".join(["'use strict'", *(_asset(f"assets/{name}") for name in _SCRIPTS)])
    scripts = [*(_asset(f"vendor/{name}") for name in _LIBRARIES), own]
    style = "\n".join([*(_asset(f"vendor/{name}") for name in _LIBRARY_STYLES), _asset("assets/style.css")])
    licences = "\n\n".join(_asset(f"vendor/LICENSE.{name}") for name in ("uPlot", "Tabulator"))
    html = _template().render(
        **facts,
        policy=_policy(scripts, style),
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
        licences=licences,
        blocks=list(blocks),
    )
    mark = re.compile("@@(" + "|".join(map(re.escape, blocks)) + ")@@</script>") if blocks else re.compile("(?!)")
    at = 0
    for found in mark.finditer(html):
        yield html[at : found.start()].encode()
        yield base64.b64encode(blocks[found[1]])
        yield b"</script>"
        at = found.end()
    yield html[at:].encode()


def _policy(scripts: list[str], style: str) -> str:
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'sha256-{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _asset(name: str) -> str:
    # A browser reads every line's end as one character, and digests what it read.
    text = (_HERE / name).read_text().replace("\r\n", "\n")
    return _SOURCE_MAP.sub("", text)


def _template() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    environment.filters |= {
        "seen": seen,
        "date": _date,
        "span": _span,
        "duration": duration,
        "percent": lambda value: "–" if value is None else f"{100 * value:.1f} %",
        "decimal": lambda value, digits=3: "–" if value is None else f"{value:.{digits}f}",
        "count": lambda value: "–" if value is None else f"{value:,.0f}",
        "plural": lambda count, one: f"{count:,} {one}{'' if count == 1 else 's'}",
        "size": _size,
    }
    return environment.from_string(_asset("assets/page.html"))


def seen(text: Any) -> str:
    """A text with every character spelled out that cannot be seen."""
    return _HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", str(text))


def _date(seconds: float | None) -> str:
    return "–" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%-d %B %Y, %H:%M UTC")


def _span(began: float, ended: float) -> str:
    first, last = (datetime.fromtimestamp(seconds, UTC) for seconds in (began, ended))
    return f"{_date(began)} to {last:%H:%M} UTC" if first.date() == last.date() else f"{_date(began)} to {_date(ended)}"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError
