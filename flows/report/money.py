"""What a run cost, as tables: devices, tokens and money by step, and what was wasted."""

from typing import Any

from cairn.flows.costs.costs import Costs

_PARTS = {
    "starting": "starting: drivers, engines, weights",
    "idle": "idle: devices without work",
    "uncommitted": "uncommitted: after a driver's last commit",
}


def cost_tables(costs: Costs) -> list[dict[str, Any]]:
    """Tables as the page's template takes them: a caption, heads, rows of texts."""
    unit = f"{costs.devices.kind}-seconds"
    rate = costs.price_per_device_hour
    priced = ["Price"] if rate is not None else []

    def row(name: str, seconds: float | None, tokens: int | None) -> list[str]:
        price = [] if rate is None else ["–" if seconds is None else f"{seconds / 3600 * rate:,.2f}"]
        return [name, _number(seconds), _share(seconds, costs.reserved_device_seconds), _count(tokens), *price]

    heads = [unit, "Share", "Tokens", *priced]
    parts = [row(str(step.step), step.device_seconds, step.tokens) for step in costs.steps if step.device_seconds]
    parts += [row(said, getattr(costs, f"{name}_device_seconds"), None) for name, said in _PARTS.items()]
    parts.append(row("all reserved", costs.reserved_device_seconds, None))
    tables = [{"caption": _caption(costs, unit), "heads": ["What it went into", *heads], "rows": parts, "sum": True}]
    wasted = [
        [*row(f"{one.cause} ({one.count:,} {one.unit})", one.device_seconds, one.tokens), _due_to(one.after_fault)]
        for one in costs.wasted
    ]
    if wasted:
        tables.append(
            {"caption": "What taught nothing", "heads": ["Cause", *heads, "Due to"], "rows": wasted, "sum": False}
        )
    return tables


def _caption(costs: Costs, unit: str) -> str:
    held = costs.devices
    said = f"{held.reserved:g} {held.kind}{'s' if held.reserved != 1 else ''} reserved by {costs.drivers} driver"
    said += "s" if costs.drivers != 1 else ""
    if costs.device_seconds_per_accepted_sample is not None:
        said += f"; {costs.device_seconds_per_accepted_sample:,.3f} {unit} for each sample trained on"
    return said


def _due_to(after_fault: bool) -> str:
    return "a fault" if after_fault else "the algorithm"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _share(value: float | None, whole: float) -> str:
    return "–" if value is None or not whole else f"{100 * value / whole:.1f} %"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
