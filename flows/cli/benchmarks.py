"""The command that shows benchmarks: benchmarks."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cairn.flows.cli.app import JsonOption, print_json, say, tell

if TYPE_CHECKING:
    from cairn.configs.schema.benchmark import Benchmark


def benchmarks(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One of them, or a YAML file of your own, in full.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="FILE", help="Rows for NAME: JSONL, Parquet or CSV; FILE@[0:100].")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the benchmarks: what each asks, who grades it, which task of lm-evaluation-harness it follows, and whether
    its rows are on this machine.

    Nothing is fetched: rows are in a file that you name, or in Hugging Face's cache. With NAME its definition is shown,
    and, where its rows are there, the digests that its results carry and the first question as it is asked.

    Examples:

    - `cairn benchmarks`
    - `cairn benchmarks gsm8k --data gsm8k/test.jsonl`
    - `cairn benchmarks my_benchmark.yaml --json`
    """
    from cairn.configs.benchmark_files import benchmark_names, load_benchmark
    from cairn.flows.cli.app import BadInput
    from cairn.tasks.benchmarks.source import how_to_get

    if name is None and data is not None:
        raise BadInput("--data gives the rows of one benchmark: name it, as in `cairn benchmarks gsm8k --data FILE`")
    if name is None:
        found = [load_benchmark(known) for known in benchmark_names()]
        if json:
            print_json([_described(benchmark) for benchmark in found])
        else:
            _print_list(found)
        return
    changes = {} if data is None else {"source": {"data": data}}
    benchmark = load_benchmark(name, changes)
    described = _described(benchmark) | _opened(benchmark)
    if json:
        print_json(described)
        return
    _print_one(described)
    if described["local"] is None:
        tell(how_to_get(benchmark))


def _described(benchmark: "Benchmark") -> dict[str, Any]:
    """Its definition, and where its rows are on this machine."""
    from cairn.tasks.benchmarks.source import local_data

    return {**benchmark.model_dump(mode="json"), "local": local_data(benchmark)}


def _opened(benchmark: "Benchmark") -> dict[str, Any]:
    """What its rows say: how many there are, digests, the first one. Nothing where they are not there."""
    from cairn.tasks.benchmarks.digests import benchmark_digests, benchmark_grader
    from cairn.tasks.benchmarks.rows import BenchmarkRows
    from cairn.tasks.benchmarks.source import local_data

    grader = benchmark_grader(benchmark)
    if local_data(benchmark) is None:
        return {"grader_version": grader.version}
    rows = BenchmarkRows.open(benchmark)
    return {
        "grader_version": grader.version,
        "local_rows": len(rows),
        "digests": benchmark_digests(benchmark, grader, rows.fingerprint),
        "first": rows.read(0),
    }


def _print_list(found: list["Benchmark"]) -> None:
    from rich.console import Console
    from rich.table import Table

    from cairn.tasks.benchmarks.source import local_data

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("benchmark", "rows", "n", "prompt", "grader", "follows", "on this machine"):
        table.add_column(heading, justify="right" if heading in ("rows", "n") else "left")
    for benchmark in found:
        follows = benchmark.follows
        shots = len(benchmark.prompt.examples)
        table.add_row(
            benchmark.name,
            "–" if benchmark.rows is None else str(benchmark.rows),
            str(benchmark.sampling.n),
            benchmark.prompt.style + (f", {shots} examples" if shots else ""),
            benchmark.grader.name,
            "–" if follows is None else f"{follows.task} {follows.version}",
            "yes" if local_data(benchmark) else "no" if benchmark.source.dataset else "with --data",
        )
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=200)).print(table)
    say("`cairn benchmarks NAME` shows one in full; a YAML file of your own is one too: docs/benchmarks.md")


def _print_one(described: dict[str, Any]) -> None:
    import yaml

    first = described.pop("first", None)
    say(yaml.safe_dump(described, sort_keys=False, allow_unicode=True, width=100).rstrip())
    if first is None:
        return
    say("\nthe first question, as it is asked")
    asked = first["prompt"]
    for turn in [{"role": "plain", "content": asked}] if isinstance(asked, str) else asked:
        say(f"── {turn['role']}\n{turn['content']}")
    say(f"── label\n{first['label']}")
