"""`cairn benchmarks`: the benchmarks by which models can be evaluated."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from cairn.configs.errors import BadInput
from cairn.flows.cli.command import Shown
from cairn.flows.cli.printing import print_stderr
from cairn.flows.cli.tables import grid

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cairn.configs.schema.evaluation import Benchmark


def benchmarks(
    name: Annotated[
        str | None, Argument(metavar="[NAME]", help="Show this benchmark in full: a name, or a YAML file of your own.")
    ] = None,
    data: Annotated[
        str | None, Option("--data", metavar="FILE", help="Rows for NAME: JSONL, Parquet or CSV; FILE@[0:100].")
    ] = None,
) -> Shown:
    """List the benchmarks, or show one.

    The list has the questions, the grader, the task of lm-evaluation-harness that each follows, and whether its rows
    are on this machine. Nothing is downloaded: the rows are in a file that you name, or in Hugging Face's cache. With
    NAME the command shows the benchmark's definition. If the rows are present, it also shows the digests that results
    carry, and the first question as the model gets it.

    Examples:

    - `cairn benchmarks`
    - `cairn benchmarks gsm8k --data gsm8k/test.jsonl`
    - `cairn benchmarks my_benchmark.yaml --json`
    """
    from cairn.configs.catalogue import benchmark_names, load_benchmark

    if name is None and data is not None:
        raise BadInput("--data needs the name of a benchmark, as in `cairn benchmarks gsm8k --data FILE`")
    if name is None:
        known = [load_benchmark(name) for name in benchmark_names()]
        return Shown([_described(benchmark) for benchmark in known], _list(known))
    benchmark = load_benchmark(name, {} if data is None else {"source": {"data": data}})
    described = _described(benchmark) | _opened(benchmark)
    return Shown(described, _one(benchmark, described))


def _described(benchmark: "Benchmark") -> dict[str, Any]:
    """Return a benchmark's definition, and the location of its rows on this machine."""
    from cairn.tasks.evaluation.benchmarks.rows import local_data

    return {**benchmark.model_dump(mode="json"), "local": local_data(benchmark)}


def _opened(benchmark: "Benchmark") -> dict[str, Any]:
    """Return the version of the grader and, if the rows are present, their number, digests and the first row."""
    from cairn.tasks.evaluation.benchmarks.rows import BenchmarkRows, benchmark_digests, benchmark_grader, local_data

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


def _list(benchmarks: list["Benchmark"]) -> "Iterator[RenderableType]":
    from cairn.tasks.evaluation.benchmarks.rows import local_data

    table = grid("benchmark", "rows", "n", "prompt", "grader", "follows", "on this machine", right=("rows", "n"))
    for benchmark in benchmarks:
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
    yield table
    yield "`cairn benchmarks NAME` shows one in full; a YAML file of your own works too: docs/benchmarks.md"


def _one(benchmark: "Benchmark", described: dict[str, Any]) -> Iterator[str]:
    import yaml

    from cairn.tasks.evaluation.benchmarks.rows import how_to_get

    first = described.pop("first", None)
    yield yaml.safe_dump(described, sort_keys=False, allow_unicode=True, width=100).rstrip()
    if first is not None:
        yield "\nthe first question, as the model gets it"
        prompt = first["prompt"]
        for turn in [{"role": "plain", "content": prompt}] if isinstance(prompt, str) else prompt:
            yield f"── {turn['role']}\n{turn['content']}"
        yield f"── label\n{first['label']}"
    if described["local"] is None:
        print_stderr(how_to_get(benchmark))
