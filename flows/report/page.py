"""The page: one self-contained HTML file without any requests, or with requests to the board that served it.

A run's contents may be hostile. Text in the page's own markup is escaped; everything else is packed in base64 and
inserted as text nodes. The page's content security policy allows only its own scripts, by digest; a report loads
nothing and sends nothing.
"""

import base64
import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from cairn.flows.reading.metrics import find_metric
from cairn.flows.report.facts import duration
from cairn.flows.text import number, percent

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Panel:
    """Curves over the iterations with a common axis."""

    title: str
    curves: Sequence[tuple[str, str]]
    """(metric name in `docs/metrics.md`, label in the legend)."""
    unit: str = ""
    log: bool = False
    """Whether the axis is logarithmic."""
    needs: str = ""
    """A metric without which the panel is not informative."""


PANELS = tuple(
    Panel(**entry) for entry in tomllib.loads((_HERE / "assets" / "panels.toml").read_text("utf-8"))["panels"]
)

_OFTEN_ZERO = {"age/mean", "age/max", "train/tis_clipfrac", "train/value_clipfrac"}
"""Metrics that are only drawn where they are not zero throughout."""


def chosen_panels(metrics: Mapping[str, Sequence[float | None]]) -> list[dict[str, Any]]:
    """Return the panels of a run, with the meaning of each metric, in the form of the page's scripts. Of equal curves,
    only the first is drawn."""
    panels = []
    for order, panel in enumerate(PANELS):
        curves, drawn = [], list[Sequence[float | None]]()
        for name, label in panel.curves:
            if name not in metrics or (name in _OFTEN_ZERO and not any(metrics[name])):
                continue
            if not any(_adds_nothing(metrics[name], other) for other in drawn):
                curves.append({"metric": name, "label": label, "meaning": meaning(name)})
                drawn.append(metrics[name])
        if curves and (not panel.needs or panel.needs in metrics):
            panels.append(
                {"title": panel.title, "unit": panel.unit, "curves": curves, "log": panel.log, "order": order}
            )
    return panels


def _adds_nothing(values: Sequence[float | None], drawn: Sequence[float | None]) -> bool:
    return all(value is None or value == other for value, other in zip(values, drawn, strict=True))


def meaning(name: str) -> str:
    """Return a metric's description, one sentence with its unit; empty for metrics of user code."""
    metric = find_metric(name)
    return "" if metric is None else f"{metric.meaning} [{metric.unit}]" if metric.unit else metric.meaning


_LIBRARIES = ("uPlot.iife.min.js", "tabulator.min.js")
_LIBRARY_STYLES = ("uPlot.min.css", "tabulator_simple.min.css")
_SCRIPTS = ("decode.js", "text.js", "curves.js", "tokens.js", "reader.js", "samples.js", "main.js")
_LIVE = ("feed.js", "actions.js", "runs.js")
"""Scripts of the board's pages alone."""
_SOURCE_MAP = re.compile(r"^(//# sourceMappingURL=.*|/\*# sourceMappingURL=.*\*/)$", re.MULTILINE)
"""Reference to a source map, which a browser's developer tools would request."""
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""Invisible characters, and characters that move surrounding text; the same as in `assets/text.js`."""


def write_page(facts: Mapping[str, Any], blocks: Mapping[str, bytes]) -> Iterator[bytes]:
    """Yield the page in pieces.

    Args:
        facts: values for the template; `content` names the template of the page's own part, and `live` is None for a
            report.
        blocks: packed columns, by the names that the scripts use.
    """
    live = facts["live"] is not None
    own = "\n".join(["'use strict'", *(_asset(f"assets/{name}") for name in (*_SCRIPTS, *(_LIVE if live else ())))])
    scripts = [*(_asset(f"vendor/{name}") for name in _LIBRARIES), own]
    style = "\n".join([*(_asset(f"vendor/{name}") for name in _LIBRARY_STYLES), _asset("assets/style.css")])
    licences = "\n\n".join(_asset(f"vendor/LICENSE.{name}") for name in ("uPlot", "Tabulator"))
    html = (
        _templates()
        .get_template("page.html")
        .render(
            **facts,
            policy=_policy(scripts, style, live),
            style=Markup(style),
            scripts=[Markup(script) for script in scripts],
            licences=licences,
            blocks=list(blocks),
        )
    )
    mark = re.compile("@@(" + "|".join(map(re.escape, blocks)) + ")@@</script>") if blocks else re.compile("(?!)")
    at = 0
    for match in mark.finditer(html):
        yield html[at : match.start()].encode()
        yield base64.b64encode(blocks[match[1]])
        yield b"</script>"
        at = match.end()
    yield html[at:].encode()


def render_content(facts: Mapping[str, Any]) -> str:
    """Return the page's own part alone, for a page that is open and shows older values."""
    return str(_templates().get_template(facts["content"]).render(**facts))


def _policy(scripts: list[str], style: str, live: bool) -> str:
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    connect = "connect-src 'self'; " if live else ""
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'sha256-{_digest(style)}'; {connect}"
        "base-uri 'none'; form-action 'none'"
    )


@cache
def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    # A browser normalizes line ends to one character before it computes the digest.
    text = (_HERE / name).read_text().replace("\r\n", "\n")
    return _SOURCE_MAP.sub("", text)


@cache
def _templates() -> Environment:
    loader = FunctionLoader(lambda name: _asset(f"assets/{name}"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False, loader=loader)
    environment.filters |= {
        "seen": seen,
        "date": _date,
        "span": _span,
        "duration": duration,
        "percent": percent,
        "decimal": lambda value, digits=3: number(value, f".{digits}f"),
        "count": lambda value: number(value, ",.0f"),
        "plural": lambda count, one: f"{count:,} {one}{'' if count == 1 else 's'}",
        "size": _size,
    }
    return environment


def seen(text: Any) -> str:
    """Return a text with every invisible character escaped."""
    return _HIDDEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", str(text))


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
