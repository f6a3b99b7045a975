"""Commands that evaluate and compare models: eval, leaderboard, benchmarks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cairn.flows.cli.app import FAILED, BadInput, JsonOption, StoreOption
from cairn.flows.cli.evaluation_logs import require_exportable, write_log
from cairn.flows.cli.printing import print_json, say, tell

if TYPE_CHECKING:
    from cairn.configs.schema.evaluation import Benchmark
    from cairn.flows.evaluation.comparing import Standing
    from cairn.flows.evaluation.evaluating import Found, Watcher
    from cairn.flows.evaluation.models import Evaluable
    from cairn.storage.store.store import Store

EngineOption = Annotated[
    str | None, typer.Option("--engine", metavar="KIND", help="transformers or sglang; by default that of the run.")
]
BaselineOption = Annotated[
    str | None,
    typer.Option("--baseline", metavar="RUN@ITER|FOLDER", help="Compare with the stored results of this run or model."),
]
MarginOption = Annotated[float, typer.Option("--margin", min=0, help="Tolerated drop of a score below the baseline's.")]
FailOption = Annotated[
    bool, typer.Option("--fail-on-regression", help="Exit with 1 if one is worse than the baseline.")
]
GateOption = Annotated[
    bool,
    typer.Option(
        "--gate-on-regression",
        help="Let the run wait for approval before its next iteration if one is worse than the baseline.",
    ),
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", metavar="FORMAT", help="float32 or bfloat16; by default that of the run.")
]


def evaluate(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN[@ITER|@A:B]] BENCHMARK…",
            help="A run, unless --model is set, and benchmarks: their names or YAML files.",
        ),
    ],
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FOLDER", help="A model folder in Hugging Face format.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option("--every", metavar="N", min=1, help="With RUN@A:B: only every N-th iteration, starting at A."),
    ] = None,
    n: Annotated[int | None, typer.Option("-n", min=1, help="Responses per question.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="[NAME=]FILE",
            help="Rows of all benchmarks or of one: JSONL, Parquet or CSV; FILE@[0:100] for a part; repeatable.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.OPTION=VALUE", help="Change an option of the benchmarks; repeatable."),
    ] = None,
    engine: EngineOption = None,
    dtype: DtypeOption = None,
    gpus: Annotated[
        float | None, typer.Option("--gpus", min=0, help="GPUs of the engine; 0 computes on the CPU.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads of the engine.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of all sampling.")] = None,
    baseline: BaselineOption = None,
    margin: MarginOption = 0.0,
    fail_on_regression: FailOption = False,
    gate_on_regression: GateOption = False,
    export: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            "--export",
            metavar="inspect PATH",
            help="Write logs for Inspect's viewer: FILE.eval for one result, else a folder for one log each.",
        ),
    ] = None,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Evaluate weights on benchmarks, with an engine of their own.

    The results are stored in the store's `evals` folder. A result is identified by all that it depends on: weights,
    tokenizer, benchmark, sampling, engine, number format, grader, rows. A stored result is shown without computing
    anything. If another process computes the result, the command waits for it. Finished samples of a killed evaluation
    are used. The run may be training meanwhile: the command does not take its lease.

    RUN without an iteration, and RUN@latest, mean the newest weights that the run has published; RUN@initial means its
    initial weights.

    Examples:

    - `cairn eval quickstart@39 heldout` a benchmark of the run's own: what it evaluated itself is shown
    - `cairn eval quickstart@39 gsm8k --data gsm8k/test.jsonl`
    - `cairn eval quickstart@0:39 my_benchmark.yaml --every 10`
    - `cairn eval --model models/qwen3 gsm8k math500 --dtype bfloat16 --gpus 1 --json`
    - `cairn eval --model models/qwen3 aime2024 -n 16 --set sampling.temperature=0.7`
    - `cairn eval quickstart my_benchmark.yaml --export inspect logs`
    - `cairn eval quickstart gsm8k --data gsm8k/test.jsonl --baseline quickstart@initial --gate-on-regression`
    """
    from cairn.flows.cli.evaluation_tables import print_results
    from cairn.flows.cli.reading import answering_store

    asked = names if model is not None else names[1:]
    if not asked:
        raise BadInput("name at least one benchmark, such as gsm8k, or a YAML file of your own")
    require_baseline(baseline, gate_on_regression)
    changes = _changes(overrides or [])
    from cairn.flows.evaluation.asking import benchmarks_of

    opened = answering_store(store)
    from cairn.flows.evaluation.models import benchmarks_of_run

    with _naming_bad_input():
        own = None if model is not None else benchmarks_of_run(opened, names[0])
    benchmarks = benchmarks_of(asked, n=n, data=data or (), changes=changes, own=own, seed=seed)
    from cairn.flows.evaluation.evaluating import SEED, evaluate_models
    from cairn.flows.evaluation.regression import evaluated_run, regressions

    given = {"engine": engine, "dtype": dtype, "num_gpus": gpus, "num_threads": threads}
    options = {name: value for name, value in given.items() if value is not None}
    with _naming_bad_input():
        gate = evaluated_run(None if model is not None else names[0]) if gate_on_regression else None
        models = _models(opened, names[0], model, every, options)
        require_exportable(export, len(models) * len(benchmarks))
        found: list[Found] = []
        with _watched(hidden=json) as watcher:
            for one in evaluate_models(
                opened, models, benchmarks, seed=SEED if seed is None else seed, watcher=watcher
            ):
                found.append(one)
                verdict = "computed" if one.computed else "found in the store, not computed"
                watcher.says(f"{one.result.key.benchmark} on {one.model}: {verdict}")
                if export is not None:
                    watcher.says(f"written for Inspect: {write_log(opened, one, export[1])}")
    if json:
        print_json([_as_json(one) for one in found])
    else:
        print_results(found)
    with _naming_bad_input():  # after what was found is shown: that stands also where there is no baseline
        worse = [] if baseline is None else regressions(opened, found, baseline, margin, tell, gate=gate)
    if worse and fail_on_regression:
        raise typer.Exit(FAILED)


def leaderboard(
    benchmark: Annotated[
        str | None, typer.Option("--benchmark", metavar="NAME", help="Only results of this benchmark.")
    ] = None,
    baseline: BaselineOption = None,
    margin: MarginOption = 0.0,
    fail_on_regression: FailOption = False,
    gate_on_regression: GateOption = False,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Show all evaluation results of a store, by benchmark, the best first.

    Results with equal questions, sampling and grading are in one group; engine and number format may differ. With
    `--baseline` they are compared with the baseline question by question. The newest result of each group is a
    regression if it is worse by more than the margin, and by more than chance (95 %). Then Prefect gets the event
    `cairn.evaluation.regressed`, if `PREFECT_API_URL` or a profile names a server. `--gate-on-regression` opens the
    approval gate of the run that the weights come from.

    Examples:

    - `cairn leaderboard`
    - `cairn leaderboard --benchmark gsm8k --baseline quickstart@initial`
    - `cairn leaderboard --baseline models/qwen3 --margin 0.01 --fail-on-regression` exits with 1
    """
    from cairn.flows.cli.evaluation_tables import print_standings
    from cairn.flows.cli.reading import answering_store

    require_baseline(baseline, gate_on_regression)
    opened = answering_store(store)
    from cairn.flows.evaluation.comparing import leaderboard as standings
    from cairn.flows.evaluation.regression import open_gate, raise_event, sentence

    found = standings(opened, benchmark, baseline, margin)
    if benchmark is not None and not found:
        raise BadInput(f"there is no result of a benchmark {benchmark!r} in {store}; `cairn leaderboard` shows all")
    if baseline is not None and not any(one.baseline for one in found):
        raise BadInput(f"there is no result of {baseline} to compare with; `cairn eval` makes one")
    worse = [one for one in found if one.newest and one.comparison is not None and one.comparison.regressed]
    if json:
        print_json([_standing_as_json(one) for one in found])
    elif not found:
        say(f"no results in {store}; `cairn eval` makes some")
    else:
        print_standings(found, baseline)
    for one in worse:
        assert one.baseline is not None
        assert one.comparison is not None
        tell(said := sentence(one.result, one.baseline, one.comparison))
        raise_event(one.result, one.baseline, one.comparison, tell)
        if gate_on_regression and (run := one.result.origin.get("run")):
            open_gate(opened, str(run), said, tell)
    if worse and fail_on_regression:
        raise typer.Exit(FAILED)


def require_baseline(baseline: str | None, gate_on_regression: bool) -> None:
    """Raise BadInput where a gate is requested without a baseline."""
    if gate_on_regression and baseline is None:
        raise BadInput("--gate-on-regression needs --baseline: set it to the run or model to compare with")


def _changes(overrides: list[str]) -> dict[str, dict[str, Any]]:
    import yaml

    from cairn.configs.yaml_file import parse_yaml

    changes: dict[str, dict[str, Any]] = {}
    for override in overrides:
        option, equals, value = override.partition("=")
        section, dot, key = option.partition(".")
        if not (equals and dot and section and key):
            raise BadInput(f"--set {override!r} is not SECTION.OPTION=VALUE, such as sampling.temperature=0.7")
        try:
            changes.setdefault(section, {})[key] = parse_yaml(value)
        except yaml.YAMLError:
            raise BadInput(f"--set {override!r}: the value is not YAML") from None
    return changes


def _models(
    store: "Store", place: str, folder: Path | None, every: int | None, options: dict[str, Any]
) -> "Sequence[Evaluable]":
    from cairn.flows.evaluation.models import weights_to_evaluate

    run, model = (place, None) if folder is None else (None, str(folder))
    return weights_to_evaluate(store, run, model, every, options, tell)


@contextmanager
def _naming_bad_input() -> Iterator[None]:
    from pydantic import ValidationError

    from cairn.flows.evaluation.models import BadPlace

    try:
        yield
    except BadPlace as error:
        raise BadInput(str(error)) from None
    except ValidationError as error:
        problem = error.errors()[0]
        raise BadInput(f"--{problem['loc'][0]} is {problem['input']!r}; {problem['msg']}") from None


@contextmanager
def _watched(hidden: bool) -> "Iterator[Watcher]":
    """Show a progress bar for each benchmark on stderr, with messages above it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from cairn.flows.evaluation.evaluating import Watcher

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tasks: dict[str, Any] = {}
    with Progress(*columns, console=console, disable=hidden or not console.is_terminal) as bars:

        def progress(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        yield Watcher(tell, progress)


def _as_json(found: "Found") -> dict[str, Any]:
    result = found.result
    return {
        "model": found.model,
        "benchmark": result.key.benchmark,
        "computed": found.computed,
        "path": result.key.folder,
        **result.model_dump(mode="json", exclude={"values", "outputs"}),
        "digest": result.digest,
    }


def _standing_as_json(one: "Standing") -> dict[str, Any]:
    result, compared = one.result, one.comparison
    return {
        "benchmark": result.key.benchmark,
        "rank": one.rank,
        "model": one.model,
        "engine": result.key.settings.get("engine"),
        "dtype": result.key.settings.get("dtype"),
        "metrics": result.metrics,
        "weights": result.key.weights,
        "path": result.key.folder,
        "committed_at": result.committed_at,
        "baseline": one.baseline is not None and compared is None,
        "difference": None if compared is None else compared.difference,
        "interval": None if compared is None else [compared.low, compared.high],
        "verdict": None if compared is None else compared.verdict,
    }


# The command `benchmarks`.


def benchmarks(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Show this benchmark in full: a name, or a YAML file of your own."),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="FILE", help="Rows for NAME: JSONL, Parquet or CSV; FILE@[0:100].")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the benchmarks: the questions, the grader, the task of lm-evaluation-harness that each follows, and whether
    its rows are on this machine.

    Nothing is downloaded: the rows are in a file that you name, or in Hugging Face's cache. With NAME the command shows
    the benchmark's definition. If the rows are present, it also shows the digests that results carry, and the first
    question as the model gets it.

    Examples:

    - `cairn benchmarks`
    - `cairn benchmarks gsm8k --data gsm8k/test.jsonl`
    - `cairn benchmarks my_benchmark.yaml --json`
    """
    from cairn.configs.catalogue import benchmark_names, load_benchmark
    from cairn.flows.cli.app import BadInput
    from cairn.tasks.evaluation.benchmarks.rows import how_to_get

    if name is None and data is not None:
        raise BadInput("--data needs the name of a benchmark, as in `cairn benchmarks gsm8k --data FILE`")
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


def _print_list(found: list["Benchmark"]) -> None:
    from rich.console import Console
    from rich.table import Table

    from cairn.tasks.evaluation.benchmarks.rows import local_data

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
    say("`cairn benchmarks NAME` shows one in full; a YAML file of your own works too: docs/benchmarks.md")


def _print_one(described: dict[str, Any]) -> None:
    import yaml

    first = described.pop("first", None)
    say(yaml.safe_dump(described, sort_keys=False, allow_unicode=True, width=100).rstrip())
    if first is None:
        return
    say("\nthe first question, as the model gets it")
    asked = first["prompt"]
    for turn in [{"role": "plain", "content": asked}] if isinstance(asked, str) else asked:
        say(f"── {turn['role']}\n{turn['content']}")
    say(f"── label\n{first['label']}")
