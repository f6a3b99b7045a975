"""How results of evaluations are printed for people."""

from collections.abc import Mapping, Sequence

from cairn.flows.cli.tables import console
from cairn.flows.evaluation.evaluating import Found


def print_results(found: Sequence[Found]) -> None:
    """A table, one result a line; of pass@k and maj@k the largest k."""
    from rich.table import Table

    columns = list(dict.fromkeys(name for one in found for name in figures(one.result.metrics)))
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("model", "benchmark", *columns, ""):
        table.add_column(name, justify="right" if name in columns else "left", overflow="fold")
    for one in found:
        shown = figures(one.result.metrics)
        verdict = "computed" if one.computed else "found"
        table.add_row(one.model, one.result.key.benchmark, *(shown.get(name, "–") for name in columns), verdict)
    console().print(table)


def figures(metrics: Mapping[str, float]) -> dict[str, str]:
    """What a table shows of a result, by column."""
    found = {f"avg@{metrics.get('n', 1):.0f}": _share(metrics["score"])}
    if "interval_low" in metrics:
        found["95 %"] = f"{_share(metrics['interval_low'])}–{_share(metrics['interval_high'])}"
    for kind in ("pass", "maj"):
        ks = [int(name.partition("@")[2]) for name in metrics if name.startswith(f"{kind}@")]
        if ks and max(ks) > 1:
            found[f"{kind}@{max(ks)}"] = _share(metrics[f"{kind}@{max(ks)}"])
    found["samples"] = f"{metrics.get('samples', 0):.0f}"
    if "response_len_mean" in metrics:
        found["tokens"] = f"{metrics['response_len_mean']:.1f}"
    found["truncated"] = f"{100 * metrics.get('truncated', 0):.1f} %"
    found["failed"] = f"{metrics.get('failed', 0):.0f}"
    return found


def _share(value: float) -> str:
    return f"{value:.3f}"
