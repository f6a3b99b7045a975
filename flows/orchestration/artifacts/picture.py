"""The curve of a run as a picture in Markdown: an SVG in a data URL, which Prefect's interface shows."""

from base64 import b64encode
from collections.abc import Mapping
from html import escape

_COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#a855f7")
"""Colors of the curves, legible on a light and on a dark page."""
_GREY = "#8a8f98"
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 420, 220, 52, 8, 30, 26


def picture(curves: Mapping[str, Mapping[int, float] | Mapping[float, float]]) -> str:
    """Return Markdown of a picture of some curves: their points by name. The first is a line, the others have marks.

    Returns an empty string if there are no points.
    """
    drawn = {name: sorted(points.items()) for name, points in curves.items() if points}
    places = [point for points in drawn.values() for point in points]
    if not places:
        return ""
    left, right = min(x for x, _ in places), max(x for x, _ in places)
    low, high = min(y for _, y in places), max(y for _, y in places)
    width, height = right - left or 1, high - low or 1

    def at(x: float, y: float) -> tuple[str, str]:
        across = _LEFT + (x - left) / width * (_WIDTH - _LEFT - _RIGHT)
        return f"{across:.1f}", f"{_TOP + (high - y) / height * (_HEIGHT - _TOP - _BOTTOM):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]
    for y in (low, (low + high) / 2, high):
        _, down = at(left, y)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down}" y2="{down}" stroke="{_GREY}" opacity=".3"/>'
        )
        parts.append(_text(_LEFT - 6, float(down) + 4, f"{y:.3g}", _GREY, "end"))
    parts.append(_text(_LEFT, _HEIGHT - 6, f"iteration {left:g}", _GREY, "start"))
    parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - 6, f"{right:g}", _GREY, "end"))
    legend = float(_LEFT)
    for number, (name, points) in enumerate(drawn.items()):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join(",".join(at(*point)) for point in points)
        dashed = ' stroke-dasharray="5 4"' if number else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dashed}/>')
        for x, y in points if number or len(points) == 1 else ():
            across, down = at(x, y)
            parts.append(f'<circle cx="{across}" cy="{down}" r="3.5" fill="{color}"/>')
        label = f"{name} {points[-1][1]:.3g}"
        parts.append(_text(legend, 16, label, color, "start"))
        legend += 8 * len(label) + 16
    svg = "".join([*parts, "</svg>"])
    return f"![curve](data:image/svg+xml;base64,{b64encode(svg.encode()).decode()})"


def _text(x: float, y: float, text: str, color: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'
