"""Commands that start or prepare a run: up, train, resume, validate."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from cairn.configs.errors import ConfigError
from cairn.flows.cli.app import BAD_INPUT, TERMINATED
from cairn.flows.cli.command import JsonOption, Root, RunArgument, Shown, bad_input
from cairn.flows.cli.failing import ending_in_box, going_on
from cairn.flows.cli.printing import print_json, print_parts, print_stderr, print_warning
from cairn.flows.cli.tables import STATE_STYLES, age, grid, summary_lines
from cairn.flows.driver.signals import AWAITING_APPROVAL, EXIT_CODE, INTERRUPTED, NOTICES, install_early_handlers

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cairn.configs.schema.run import RunConfig
    from cairn.flows.deployments.up import Up
    from cairn.flows.driver.portable import Note
    from cairn.flows.reading.views import RunStatus
    from cairn.storage.ledger.ledger import Ledger


# `cairn up`: operate runs from Prefect's interface.


REFRESH = 3.0
"""Seconds between two looks at the runs."""

MOST_RUNS = 12
"""Number of runs that are shown: those with the latest commits."""


def up(
    root: Root,
    host: Annotated[
        str, Option("--host", metavar="ADDRESS", help="Address to listen on; everyone who can reach it may start runs.")
    ] = "127.0.0.1",
    port: Annotated[int, Option("--port", min=0, max=65535, help="Port of the UI; 0 uses a free one.")] = 4200,
    no_ray: Annotated[
        bool, Option("--no-ray", help="Start no Ray head: each run starts a cluster of its own.")
    ] = False,
) -> None:
    """Operate runs from Prefect's interface, until Ctrl-C.

    You start, watch, cancel, retry, resume, fork and verify runs in a browser. The command starts Prefect's server over
    the history of the current folder, serves the deployments and the board of the store (`cairn board`), and starts a
    Ray head that their runs share. PREFECT_API_URL names an existing server to use instead, CAIRN_RAY_ADDRESS a
    cluster. When the command ends, runs that were started in the interface shut down cleanly, and Retry resumes them.
    Other runs do not depend on it.

    Examples:

    - `cairn up`
    - `cairn up --port 4300 --store s3://bucket/experiments`
    - `CAIRN_RAY_ADDRESS=auto cairn up` on a machine of a Ray cluster
    """
    from cairn.flows.orchestration.server import is_loopback

    _enable_interrupts()
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(TERMINATED))
    if not is_loopback(host):
        print_stderr(
            f"everyone who can reach {host} may start runs, and so run code: restrict access with a firewall or a proxy"
        )
    from cairn.flows.deployments.up import start

    print_stderr("starting; this takes some seconds")
    running = start(root.url, host=host, port=port, ray=not no_ray)
    try:
        print_stderr(f"the board is at {running.board_url}")
        print_stderr(f"the Prefect UI is at {running.ui_url}; Ctrl-C stops it")
        _show(running)
    finally:
        print_stderr("stopping; drivers release their runs")
        running.close()


def _show(running: "Up") -> None:
    """Show what is running, until it ends or the user interrupts it."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    if not console.is_terminal:
        while True:
            running.require()
            time.sleep(REFRESH)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            running.require()
            live.update(_table(running), refresh=True)
            time.sleep(REFRESH)


def _table(running: "Up") -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    from cairn.flows.deployments import NAMES

    parts = grid()
    parts.add_row("Prefect", running.ui_url if running.server else f"{running.ui_url}, as configured")
    parts.add_row("board", running.board_url)
    parts.add_row("deployments", f"{', '.join(NAMES)} ({running.serving.state})")
    if running.ray is not None:
        parts.add_row("Ray", f"{running.ray_address} ({running.ray.state})")
    else:
        parts.add_row("Ray", running.ray_address or "each run starts its own")
    parts.add_row("store", running.store)
    runs = grid("run", "state", "iterations", "step", "reward", "last commit")
    for status in _newest(running.store):
        runs.add_row(
            status.run,
            Text(status.state, STATE_STYLES[status.state]),
            f"{status.iterations}/{status.num_rollout}",
            status.step or "",
            "" if status.reward is None else f"{status.reward:.3f}",
            age(status.last_commit_at),
        )
    return Group(parts, "", runs)


def _newest(store: str) -> list["RunStatus"]:
    from cairn.flows.reading.views import all_runs
    from cairn.storage.opening import open_store
    from cairn.storage.store.errors import StoreError

    try:
        statuses = all_runs(open_store(store))
    except StoreError:  # it may come back
        return []
    return sorted(statuses, key=lambda status: status.last_commit_at or 0, reverse=True)[:MOST_RUNS]


def _recipe(name: str) -> Path:
    from cairn.configs.catalogue import recipe_path

    return recipe_path(name)


def _complete_recipe(incomplete: str) -> list[str]:
    from cairn.configs.catalogue import recipe_files

    return [name for name in recipe_files(Path.cwd()) if name.startswith(incomplete)]


RecipeArgument = Annotated[
    Path,
    Argument(
        metavar="RECIPE",
        help="YAML file, or a name: quickstart, Qwen3-4B (docs/recipes.md lists them).",
        parser=_recipe,
        autocompletion=_complete_recipe,
    ),
]
SetOption = Annotated[
    list[str] | None,
    Option("--set", metavar="SECTION.OPTION=VALUE", help="Change one option of the recipe; may be repeated."),
]
TakeoverOption = Annotated[
    bool, Option("--takeover", help="Take over the run from a driver that is still alive; that driver stops.")
]


def train(
    root: Root,
    recipe: RecipeArgument,
    run: Annotated[
        str | None, Option("--run", metavar="NAME", help="Name of the run; by default that of the recipe's file.")
    ] = None,
    overrides: SetOption = None,
    takeover: TakeoverOption = False,
    json: JsonOption = False,
) -> None:
    """Start a run, or resume the run of that name.

    The configuration is frozen in the ledger at the first start. If the run exists with another configuration, the
    command shows the difference and changes nothing.

    Examples:

    - `cairn train quickstart`
    - `cairn train quickstart --run warmer --set rollout.rollout_temperature=1.2`
    - `cairn train my.yaml --store s3://bucket/experiments`
    - `cairn train my.yaml --json | jq .state_digest` prints the status at the end, and progress on stderr
    """
    _handle_signals()
    from cairn.configs.loader import load
    from cairn.flows.driver.length import with_length

    name = run or recipe.stem
    changed = [word for override in overrides or [] for word in ("--set", override)]
    words = ["cairn", "train", str(recipe), "--run", name, *changed]
    with ending_in_box(root, name, words):
        config = with_length(load(recipe, overrides or [], print_warning))
        _drive(root, name, config, takeover, words, json=json)


def resume(
    root: Root,
    run: RunArgument,
    layout: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="SECTION.OPTION=VALUE",
            help="Go on with another number of ranks or engines, or another division of the model; may be repeated.",
        ),
    ] = None,
    takeover: TakeoverOption = False,
    json: JsonOption = False,
) -> None:
    """Resume a run from its last commit.

    The configuration is that of the ledger. Whatever ended the run (an error, Ctrl-C, a killed machine), no committed
    step is repeated, and the final weights equal those of a run that was never interrupted. With `--set` the run goes
    on in another layout, from a checkpoint of its newest weights: sums then round otherwise, and the ledger records the
    new values from the next commit on.

    Examples:

    - `cairn resume quickstart`
    - `cairn resume quickstart --set rollout.num_engines=1` when an engine's machine is gone
    - `cairn resume quickstart --takeover` when a hung driver still holds it
    """
    _handle_signals()
    from cairn.configs.loader import from_manifest
    from cairn.flows.driver.relayout import in_layout

    ledger = root.ledger(run)
    ledger.manifest.require_own("weights and no configuration to continue with")
    words = ["cairn", "resume", run]
    with ending_in_box(root, run, words):
        config = from_manifest(ledger.terms.config) if layout is None else in_layout(ledger, layout)
        _drive(root, run, config, takeover, words, ledger, json=json, relayout=layout or ())


def validate(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    no_files: Annotated[
        bool, Option("--no-files", help="Check what needs no model and no data, for a recipe of another machine.")
    ] = False,
    json: JsonOption = False,
) -> Shown:
    """Check a recipe, and print it with every option.

    Nothing starts. The command checks the options, their types and their combinations; the model folder and its
    tokenizer; lengths against the context; your own functions, of which it calls rewards and filters on one synthetic
    sample; and every row of local data files, of which it renders at most 1000 training rows. No GPU is needed. Exits
    with 2 if something is wrong.

    Examples:

    - `cairn validate quickstart`
    - `cairn validate my.yaml --set training.lr=1e-5 --json`
    - `cairn validate my.yaml --no-files` where the model and the data are on another machine
    """
    from cairn.configs.loader import load

    notes: list[str] = []
    try:
        config = load(recipe, overrides or [], notes.append)
        if problems := (_problems_without_files if no_files else _problems)(config, notes.append):
            raise ConfigError(problems)
        if not no_files:
            from cairn.flows.driver.length import with_length

            config = with_length(config)
    except ConfigError as error:
        if not json:
            for note in notes:
                print_warning(note)
            raise
        print_json({"valid": False, "problems": list(error.problems), "notes": notes})
        raise typer.Exit(BAD_INPUT) from None
    resolved = config.model_dump(mode="json")
    return Shown({"valid": True, "config": resolved, "notes": notes}, _resolved(recipe, config, resolved, notes))


def _problems_without_files(config: "RunConfig", note: "Note") -> list[str]:
    from cairn.flows.driver.portable import portable_problems

    return portable_problems(config, note)


def _problems(config: "RunConfig", note: "Note") -> list[str]:
    from cairn.flows.driver.synthetic_calls import synthetic_call_problems
    from cairn.flows.driver.validation import data_problems, setup_problems  # PyTorch takes seconds to import

    return setup_problems(config, note) or data_problems(config, note) or synthetic_call_problems(config, note)


def _resolved(recipe: Path, config: "RunConfig", resolved: Mapping[str, Any], notes: Sequence[str]) -> Iterator[str]:
    """Yield the recipe with every option filled in, and then print the notes and a summary to stderr."""
    import yaml

    yield yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True).removesuffix("\n")
    for note in notes:
        print_warning(note)
    kinds = {"responses": f"prompts × {config.group_size} samples", "preferences": "pairs"}
    rows = kinds.get(config.algorithm.learns_from, config.algorithm.learns_from)
    length = config.rollout.num_rollout or f"{config.rollout.num_epoch} epochs in"
    print_stderr(
        f"{recipe} is fine: {length} iterations of {config.rollout.rollout_batch_size} {rows}, "
        f"{config.training.num_steps_per_rollout} optimizer step(s) of {config.global_batch_size} samples each"
    )


def _enable_interrupts() -> None:
    """Let SIGINT stop this process even where it was ignored at the start, as in a background job of a script."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _handle_signals() -> None:
    """Handle signals from the start of a driver until its run has begun, when its own handlers take over."""
    _enable_interrupts()
    install_early_handlers()


def _drive(
    root: Root,
    run: str,
    config: "RunConfig",
    takeover: bool,
    words: Sequence[str],
    ledger: "Ledger | None" = None,
    *,
    json: bool,
    relayout: Sequence[str] = (),
) -> None:
    """Train with progress on the terminal. `words`: the command. `ledger`: that of the run, if the configuration comes
    from it and not from the user. `json`: print the status at the end to stdout, and progress to stderr."""
    from cairn.storage.ledger.commits import Step
    from cairn.storage.ledger.layout import check_name
    from cairn.storage.ledger.ledger import Ledger
    from cairn.storage.opening import open_for_runs

    with bad_input(ValueError):
        check_name(run, "run")
    store, recipe = open_for_runs(root.url), config if ledger is None else None
    from cairn.engines.fleet import warm
    from cairn.engines.processes.deferred import collecting_later

    warm.prepare(config)  # a warm process imports meanwhile, as does Prefect's server
    # Prefect shows every change of state in its UI; this terminal shows the progress. Prefect reads this when imported.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "WARNING")
    with collecting_later():
        from cairn.flows.orchestration.server import PREFECT_HOME, prepare_server

        prepare_server(PREFECT_HOME)
        from cairn.flows.driver.session import adding_stale_steps
        from cairn.flows.reading.views import RunState, run_status

    if ledger is None:
        with suppress(FileNotFoundError), adding_stale_steps(store, run, config, {}):
            ledger = Ledger.open(store, run, config)
    if ledger is not None:
        # A single request says whether the last update exists; the full status needs many.
        trained = ledger.find(config.rollout.num_rollout - 1, Step.TRAIN) is not None
        if trained and (status := run_status(store, run)).state is RunState.COMPLETED:
            print_stderr(f"run {run} has all its iterations; nothing is left to do")
            if json:
                print_json(status)
            return
    with collecting_later():
        from rich.console import Console

        from cairn.flows.driver.approval import Withheld
        from cairn.flows.driver.preemption import Preempted
        from cairn.flows.train import start
        from cairn.flows.watching.progress import Progress

    progress = Progress(config, Console(stderr=True) if json else None)
    try:
        with progress:
            run = start(store, run, recipe, takeover, progress, relayout)
    except Preempted:
        for signum in NOTICES:  # the run is released: a further signal may end the process
            signal.signal(signum, lambda signum, frame: os._exit(EXIT_CODE))
        print_stderr(f"preempted; nothing committed is lost. Continue with: {going_on(store, run, words)}")
        raise typer.Exit(EXIT_CODE) from None
    except Withheld as error:
        print_stderr(str(error))
        raise typer.Exit(AWAITING_APPROVAL) from None
    except KeyboardInterrupt:
        print_stderr(f"interrupted; nothing committed is lost. Continue with: {going_on(store, run, words)}")
        raise typer.Exit(INTERRUPTED) from None
    status = run_status(store, run)
    if json:
        print_json(status)
    else:
        from cairn.flows.reading.failure import Terminal

        print_parts(summary_lines(status, Terminal(store.url).line))
