"""The command bisect."""

from typing import Annotated

from typer import Argument, Option

from cairn.configs.errors import BadInput
from cairn.flows.cli.command import JsonOption, Root, RunArgument, Shown
from cairn.flows.cli.evaluation import (
    DtypeOption,
    EngineOption,
    GpusOption,
    ResponsesOption,
    SeedOption,
    ThreadsOption,
    section_changes,
    watched,
)
from cairn.flows.cli.tables import numbers


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
        changes=section_changes(overrides or []),
        own=benchmarks_of_run(ledger.store, run),
        seed=seed,
    )
    requests = {"engine": engine, "dtype": dtype, "num_gpus": gpus, "num_threads": threads}
    with watched(hidden=json) as watcher:
        found = bisected(
            ledger,
            wanted,
            good=None if good is None else INITIAL if good == "initial" else int(good),
            bad=bad,
            drop=drop,
            groups=groups,
            options={name: value for name, value in requests.items() if value is not None},
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
