"""Commands that evaluate and compare models: eval, bisect, leaderboard."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from cairn.configs.errors import BadInput
from cairn.flows.cli.command import JsonOption, Root, RunArgument, Shown
from cairn.flows.cli.printing import print_stderr
from cairn.flows.cli.tables import age, grid, numbers
from cairn.flows.text import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from cairn.flows.evaluation.comparing import Standing
    from cairn.flows.evaluation.evaluating import EvaluationResult, Watcher
    from cairn.flows.evaluation.models import ModelFolder
    from cairn.storage.store.store import Store

EngineOption = Annotated[
    str | None, Option("--engine", metavar="KIND", help="transformers or sglang; by default that of the run.")
]
ResponsesOption = Annotated[int | None, Option("-n", min=1, help="Responses per question.")]
GpusOption = Annotated[float | None, Option("--gpus", min=0, help="GPUs of the engine; 0 computes on the CPU.")]
ThreadsOption = Annotated[int | None, Option("--threads", min=1, help="CPU threads of the engine.")]
SeedOption = Annotated[int | None, Option("--seed", help="Seed of all sampling.")]
BaselineOption = Annotated[
    str | None,
    Option("--baseline", metavar="RUN@ITER|FOLDER", help="Compare with the stored results of this run or model."),
]
MarginOption = Annotated[float, Option("--margin", min=0, help="Tolerated drop of a score below the baseline's.")]
FailOption = Annotated[bool, Option("--fail-on-regression", help="Exit with 1 if one is worse than the baseline.")]
GateOption = Annotated[
    bool,
    Option(
        "--gate-on-regression",
        help="Let the run wait for approval before its next iteration if one is worse than the baseline.",
    ),
]
DtypeOption = Annotated[
    str | None, Option("--dtype", metavar="FORMAT", help="float32 or bfloat16; by default that of the run.")
]


def evaluate(
    root: Root,
    names: Annotated[
        list[str],
        Argument(
            metavar="[RUN[@ITER|@A:B]] BENCHMARK…",
            help="A run, unless --model is set, and benchmarks: their names or YAML files.",
        ),
    ],
    model: Annotated[
        Path | None, Option("--model", metavar="FOLDER", help="A model folder in Hugging Face format.")
    ] = None,
    every: Annotated[
        int | None,
        Option("--every", metavar="N", min=1, help="With RUN@A:B: only every N-th iteration, starting at A."),
    ] = None,
    n: ResponsesOption = None,
    data: Annotated[
        list[str] | None,
        Option(
            "--data",
            metavar="[NAME=]FILE",
            help="Rows of all benchmarks or of one: JSONL, Parquet or CSV; FILE@[0:100] for a part; repeatable.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        Option("--set", metavar="SECTION.OPTION=VALUE", help="Change an option of the benchmarks; repeatable."),
    ] = None,
    engine: EngineOption = None,
    dtype: DtypeOption = None,
    gpus: GpusOption = None,
    threads: ThreadsOption = None,
    seed: SeedOption = None,
    baseline: BaselineOption = None,
    margin: MarginOption = 0.0,
    fail_on_regression: FailOption = False,
    gate_on_regression: GateOption = False,
    export: Annotated[
        tuple[str, Path] | None,
        Option(
            "--export",
            metavar="inspect PATH",
            help="Write logs for Inspect's viewer: FILE.eval for one result, else a folder for one log each.",
        ),
    ] = None,
    json: JsonOption = False,
) -> Shown:
    """Evaluate weights on benchmarks.

    The evaluation has an engine of its own. The results are stored in the store's `evals` folder. A result is
    identified by all that it depends on: weights, tokenizer, benchmark, sampling, engine, number format, grader, rows.
    A stored result is shown without computing anything. If another process computes the result, the command waits for
    it. Finished samples of a killed evaluation are used. The run may be training meanwhile: the command does not take
    its lease.

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
    requested = names if model is not None else names[1:]
    if not requested:
        raise BadInput("name at least one benchmark, such as gsm8k, or a YAML file of your own")
    _require_baseline(baseline, gate_on_regression)
    changes = _section_changes(overrides or [])
    from cairn.flows.evaluation.benchmarks import benchmarks_of
    from cairn.flows.evaluation.models import benchmarks_of_run
    from cairn.storage.opening import open_for_runs

    store, place = open_for_runs(root.url), names[0] if model is None else None
    own = None if place is None else benchmarks_of_run(store, place)
    benchmarks = benchmarks_of(requested, n=n, data=data or (), changes=changes, own=own, seed=seed)
    from cairn.flows.evaluation.evaluating import SEED, evaluate_models
    from cairn.flows.evaluation.regression import evaluated_run, regressions

    gate = evaluated_run(place) if gate_on_regression else None
    models = _models(store, place, model, every, _engine_options(engine, dtype, gpus, threads))
    _require_exportable(export, len(models) * len(benchmarks))
    results: list[EvaluationResult] = []
    with _watched(hidden=json) as watcher:
        for one in evaluate_models(store, models, benchmarks, seed=SEED if seed is None else seed, watcher=watcher):
            results.append(one)
            watcher.says(f"{one.result.key.benchmark} on {one.model}: {one.source}")
            if export is not None:
                watcher.says(f"written for Inspect: {_write_log(store, one, export[1])}")

    def regressed() -> bool:  # called after the results are shown, so a missing baseline does not hide them
        worse = [] if baseline is None else regressions(store, results, baseline, margin, print_stderr, gate=gate)
        return bool(worse) and fail_on_regression

    return Shown([_as_json(one) for one in results], [_results(results)], regressed)


def bisect(
    root: Root,
    run: RunArgument,
    benchmark: Annotated[str, Argument(metavar="BENCHMARK", help="A benchmark: its name or YAML file.")],
    good: Annotated[
        str | None,
        Option(
            "--good",
            metavar="ITER|initial",
            help="Iteration after which the score was good; by default that of the best stored result.",
        ),
    ] = None,
    bad: Annotated[
        int | None,
        Option(
            "--bad", metavar="ITER", min=0, help="Iteration after which it was lost; by default the newest published."
        ),
    ] = None,
    drop: Annotated[
        float | None,
        Option(
            "--drop",
            metavar="SCORE",
            min=0,
            help="A version has lost the benchmark if it is worse than the good one by more than this; by default half "
            "of the ends' difference.",
        ),
    ] = None,
    groups: Annotated[
        int,
        Option(
            "--groups",
            metavar="N",
            min=0,
            help="Make the update again without each of N groups, those with the largest advantages first.",
        ),
    ] = 32,
    n: ResponsesOption = None,
    data: Annotated[
        str | None, Option("--data", metavar="FILE", help="Rows of the benchmark: JSONL, Parquet or CSV.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        Option("--set", metavar="SECTION.OPTION=VALUE", help="Change an option of the benchmark; repeatable."),
    ] = None,
    engine: EngineOption = None,
    dtype: DtypeOption = None,
    gpus: GpusOption = None,
    threads: ThreadsOption = None,
    seed: SeedOption = None,
    json: JsonOption = False,
) -> Shown:
    """Find the update, and its group, that lost a benchmark.

    The versions between a good and a bad one are evaluated by halves, as by `cairn eval`: at most 6 for 40 updates.
    Then the update is made again from the weights before it, once without each group, and evaluated. The run is not
    changed, and may be running. Every result is stored, so an interrupted search goes on where it was.

    Scores are compared question by question. A version has lost the benchmark if it is worse than the good one by more
    than `--drop`, and by more than chance (95 %).

    Examples:

    - `cairn bisect quickstart heldout` a benchmark of the run's own
    - `cairn bisect quickstart gsm8k --data gsm8k/test.jsonl --good 10 --bad 30`
    - `cairn bisect quickstart heldout --good initial --drop 0.05 --groups 8 --json`
    - `cairn bisect quickstart heldout --groups 0` the update alone
    """
    from cairn.flows.evaluation.benchmarks import benchmarks_of
    from cairn.flows.evaluation.bisect import GROUP_HEADER, HEADER, INITIAL
    from cairn.flows.evaluation.bisect import bisect as bisected
    from cairn.flows.evaluation.evaluating import SEED
    from cairn.flows.evaluation.models import benchmarks_of_run

    if good is not None and good != "initial" and not good.isdecimal():
        raise BadInput(f"--good {good!r} is neither the number of an iteration nor initial")
    ledger = root.ledger(run)
    (wanted,) = benchmarks_of(
        [benchmark],
        n=n,
        data=[] if data is None else [data],
        changes=_section_changes(overrides or []),
        own=benchmarks_of_run(ledger.store, run),
        seed=seed,
    )
    with _watched(hidden=json) as watcher:
        found = bisected(
            ledger,
            wanted,
            good=None if good is None else INITIAL if good == "initial" else int(good),
            bad=bad,
            drop=drop,
            groups=groups,
            options=_engine_options(engine, dtype, gpus, threads),
            seed=SEED if seed is None else seed,
            watcher=watcher,
        )
    text = [numbers(HEADER, [one.line() for one in found.versions])]
    if found.groups:
        text.append(numbers(GROUP_HEADER, [one.line() for one in found.groups]))
    culprit = found.culprit()
    value = found.model_dump(mode="json") | {
        "group": None if culprit is None else culprit.group_id,
        "conclusion": found.conclusion(),
    }
    return Shown(value, [*text, found.conclusion()])


def leaderboard(
    root: Root,
    benchmark: Annotated[
        str | None, Option("--benchmark", metavar="NAME", help="Only results of this benchmark.")
    ] = None,
    baseline: BaselineOption = None,
    margin: MarginOption = 0.0,
    fail_on_regression: FailOption = False,
    gate_on_regression: GateOption = False,
) -> Shown:
    """Show a store's evaluations by benchmark, the best first.

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
    _require_baseline(baseline, gate_on_regression)
    from cairn.flows.evaluation.comparing import leaderboard as all_standings
    from cairn.flows.evaluation.regression import open_gate, raise_event, sentence

    standings = all_standings(root.store, benchmark, baseline, margin)
    if benchmark is not None and not standings:
        raise BadInput(f"there is no result of a benchmark {benchmark!r} in {root.url}; `cairn leaderboard` shows all")
    if baseline is not None and not any(one.baseline for one in standings):
        raise BadInput(f"there is no result of {baseline} to compare with; `cairn eval` makes one")

    def regressed() -> bool:
        worse = [one for one in standings if one.newest and one.comparison is not None and one.comparison.regressed]
        for one in worse:
            assert one.baseline is not None
            assert one.comparison is not None
            text = sentence(one.result, one.baseline, one.comparison)
            print_stderr(text)
            raise_event(one.result, one.baseline, one.comparison, print_stderr)
            if gate_on_regression and (run := one.result.origin.get("run")):
                open_gate(root.store, str(run), text, print_stderr)
        return bool(worse) and fail_on_regression

    shown = [_standings(standings, baseline)] if standings else f"no results in {root.url}; `cairn eval` makes some"
    return Shown([_standing_as_json(one) for one in standings], shown, regressed)


def _require_baseline(baseline: str | None, gate_on_regression: bool) -> None:
    """Raise BadInput where a gate is requested without a baseline."""
    if gate_on_regression and baseline is None:
        raise BadInput("--gate-on-regression needs --baseline: set it to the run or model to compare with")


def _engine_options(engine: str | None, dtype: str | None, gpus: float | None, threads: int | None) -> dict[str, Any]:
    """Return the requested options of the engine; the others are those of the run."""
    requests = {"engine": engine, "dtype": dtype, "num_gpus": gpus, "num_threads": threads}
    return {name: value for name, value in requests.items() if value is not None}


def _section_changes(overrides: list[str]) -> dict[str, dict[str, Any]]:
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
    store: "Store", place: str | None, folder: Path | None, every: int | None, options: dict[str, Any]
) -> "Sequence[ModelFolder]":
    from pydantic import ValidationError

    from cairn.flows.evaluation.models import weights_to_evaluate

    try:
        return weights_to_evaluate(store, place, None if folder is None else str(folder), every, options, print_stderr)
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

        yield Watcher(print_stderr, progress)


def _as_json(one: "EvaluationResult") -> dict[str, Any]:
    result = one.result
    return {
        "model": one.model,
        "benchmark": result.key.benchmark,
        "computed": one.computed,
        "path": result.key.folder,
        **result.model_dump(mode="json", exclude={"values", "outputs"}),
        "digest": result.digest,
    }


def _standing_as_json(one: "Standing") -> dict[str, Any]:
    result, compared = one.result, one.comparison
    return {
        "benchmark": result.key.benchmark,
        "differs": one.differs,
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


def _results(results: "Sequence[EvaluationResult]") -> "Table":
    """Return a table, one result a line."""
    from cairn.flows.evaluation.comparing import figures

    rows = [(one.model, one.result.key.benchmark, figures(one.result.metrics), one.source) for one in results]
    columns = list(dict.fromkeys(name for _, _, shown, _ in rows for name in shown))
    table = grid("model", "benchmark", *columns, "result", right=columns, fold=True)
    for model, benchmark, shown, source in rows:
        table.add_row(_text(model), _text(benchmark), *(shown.get(name, "–") for name in columns), source)
    return table


def _standings(standings: "Sequence[Standing]", baseline: str | None) -> "Table":
    """Return a table of all results. Comparable ones are next to each other, the best first."""
    from cairn.flows.evaluation.comparing import figures

    columns = list(dict.fromkeys(name for one in standings for name in figures(one.result.metrics)))
    against = [] if baseline is None else [f"against {baseline}"]
    names = ("benchmark", "rank", "model", "engine", *columns, *against, "computed")
    table = grid(*names, right=["rank", *columns], fold=True)
    for one in standings:
        shown, settings = figures(one.result.metrics), one.result.key.settings
        compared = one.comparison
        versus = "–" if compared is None else f"{compared.difference:+.3f} {compared.verdict}"
        table.add_row(
            _text(one.result.key.benchmark + (f" ({one.differs})" if one.differs else "")) if one.rank == 1 else "",
            str(one.rank),
            _text(one.model),
            f"{settings.get('engine')}, {settings.get('dtype')}",
            *(shown.get(name, "–") for name in columns),
            *([versus] if against else []),
            age(one.result.committed_at),
        )
    return table


def _text(text: str) -> "Text":
    from rich.text import Text

    return Text(printable(text))


# Logs for the viewer of Inspect.


def _require_exportable(export: tuple[str, Path] | None, results: int) -> None:
    """Check `--export` before anything is computed, and create the folder. Raises BadInput."""
    if export is None:
        return
    kind, path = export
    if kind != "inspect":
        raise BadInput(f"--export {kind} is not a format: use inspect, as in `--export inspect logs`")
    if path.suffix == ".eval" and results > 1:
        raise BadInput(f"{path} can contain only one log, but there are {results} results: use the name of a folder")
    if path.suffix != ".eval" and path.exists() and not path.is_dir():
        raise BadInput(f"{path} is a file, but not a log: use a folder, or a file name that ends in .eval")
    try:
        (path.parent if path.suffix == ".eval" else path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error}): use another path") from None


def _write_log(store: "Store", one: "EvaluationResult", path: Path) -> Path:
    """Write a result's log to `path`, or into it, and return its path. Raises BadInput where it cannot be written."""
    from cairn.flows.evaluation.inspect_log import export_inspect, log_name
    from cairn.storage.evals import read_samples

    file = path if path.suffix == ".eval" else path / log_name(one.result)
    try:
        export_inspect(one.result, read_samples(store, one.result), file, one.model)
    except OSError as error:
        raise BadInput(f"{file} cannot be written ({error}): use another path") from None
    return file
