"""Results of evaluations for people: the figures of one, and a table of several in Markdown."""

from collections.abc import Mapping, Sequence

from cairn.flows.evaluation.evaluating import Found


def markdown(found: Sequence[Found]) -> str:
    """A table, one result a line."""
    columns = list(dict.fromkeys(name for one in found for name in figures(one.result.metrics)))
    names = ["model", "benchmark", *columns, "result"]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * 2 + "---:|" * len(columns) + "---|"]
    for one in found:
        shown = figures(one.result.metrics)
        verdict = "computed" if one.computed else "found, nothing computed"
        cells = [one.model, one.result.key.benchmark, *(shown.get(name, "–") for name in columns), verdict]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def figures(metrics: Mapping[str, float]) -> dict[str, str]:
    """What a table shows of a result, by column: of pass@k and maj@k the largest k."""
    found = {f"avg@{metrics.get('n', 1):.0f}": f"{metrics['score']:.3f}"}
    if "interval_low" in metrics:
        found["95 %"] = f"{metrics['interval_low']:.3f}–{metrics['interval_high']:.3f}"
    for kind in ("pass", "maj"):
        largest = max((int(name.partition("@")[2]) for name in metrics if name.startswith(f"{kind}@")), default=1)
        if largest > 1:
            found[f"{kind}@{largest}"] = f"{metrics[f'{kind}@{largest}']:.3f}"
    found["samples"] = f"{metrics.get('samples', 0):.0f}"
    if "response_len_mean" in metrics:
        found["tokens"] = f"{metrics['response_len_mean']:.1f}"
    found["truncated"] = f"{100 * metrics.get('truncated', 0):.1f} %"
    found["failed"] = f"{metrics.get('failed', 0):.0f}"
    return found
