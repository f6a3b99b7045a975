"""Print results of evaluations for people."""

from collections.abc import Sequence
from typing import Any

from cairn.flows.cli.tables import age, console
from cairn.flows.evaluation.comparing import Standing, figures
from cairn.flows.evaluation.evaluating import Found
from cairn.flows.text import printable


def print_results(found: Sequence[Found]) -> None:
    """Print a table, one result a line."""
    rows = [(one.model, one.result.key.benchmark, figures(one.result.metrics), _verdict(one)) for one in found]
    columns = list(dict.fromkeys(name for _, _, shown, _ in rows for name in shown))
    table = _table("model", "benchmark", *columns, "result", right=columns)
    for model, benchmark, shown, verdict in rows:
        table.add_row(_text(model), _text(benchmark), *(shown.get(name, "–") for name in columns), verdict)
    console().print(table)


def print_standings(found: Sequence[Standing], baseline: str | None) -> None:
    """Print a table of all results. Comparable ones are next to each other, the best first."""
    columns = list(dict.fromkeys(name for one in found for name in figures(one.result.metrics)))
    against = [] if baseline is None else [f"against {baseline}"]
    table = _table("benchmark", "rank", "model", "engine", *columns, *against, "computed", right=["rank", *columns])
    for one in found:
        shown, settings = figures(one.result.metrics), one.result.key.settings
        compared = one.comparison
        versus = "–" if compared is None else f"{compared.difference:+.3f} {compared.verdict}"
        table.add_row(
            _text(one.result.key.benchmark) if one.rank == 1 else "",
            str(one.rank),
            _text(one.model),
            f"{settings.get('engine')}, {settings.get('dtype')}",
            *(shown.get(name, "–") for name in columns),
            *([versus] if against else []),
            age(one.result.committed_at),
        )
    console().print(table)


def _table(*names: str, right: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in names:
        table.add_column(_text(name), justify="right" if name in right else "left", overflow="fold")
    return table


def _text(text: str) -> Any:
    from rich.text import Text

    return Text(printable(text))


def _verdict(one: Found) -> str:
    return "computed" if one.computed else "found in the store, not computed"
