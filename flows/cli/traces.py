"""The command `import traces`: samples that other trainers recorded, as a run."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from cairn.configs.errors import BadInput
from cairn.flows.cli.command import JsonOption, Root, Shown, bad_input
from cairn.flows.cli.printing import print_stderr
from cairn.flows.cli.training import TakeoverOption

if TYPE_CHECKING:
    from cairn.flows.traces.importing import ImportedRun


class TraceFormat(StrEnum):
    """Format of traces; `cairn.flows.traces.importing.FORMATS` has the same names."""

    TRL = "trl"
    VERL = "verl"
    PRIME_RL = "prime-rl"
    ATIF = "atif"


def traces(
    root: Root,
    source: Annotated[Path, Argument(metavar="PATH", help="A folder or a file with traces of another trainer.")],
    format: Annotated[
        TraceFormat | None, Option("--format", help="Format of the traces; recognized by its files by default.")
    ] = None,
    run: Annotated[
        str | None, Option("--run", metavar="NAME", help="Name of the run; by default that of the folder.")
    ] = None,
    follow: Annotated[
        bool, Option("--follow", help="Go on with what the trainer writes from now on, until Ctrl-C.")
    ] = False,
    rewards: Annotated[
        list[str] | None,
        Option(
            "--reward",
            metavar="NAME[=WEIGHT]",
            help="trl: a column that is part of the reward, with its weight; all with weight 1 by default.",
        ),
    ] = None,
    takeover: TakeoverOption = False,
    json: JsonOption = False,
) -> Shown:
    """Import what another trainer recorded as a run that `report`, `show`, `sql`, `rescore` and `whatif` read.

    Formats: TRL's completions (*trl*), verl's rollouts (*verl*), prime-rl's and verifiers' traces.jsonl (*prime-rl*),
    and the Agent Trajectory Interchange Format (*atif*). Files are only read, and never as a pickle. A later import of
    the same files adds what is new. What cannot be read is named with file and line and left out; the command then
    exits with 1.

    Examples:

    - `cairn import traces outputs/grpo --run grpo` what TRL wrote with log_completions=True
    - `cairn import traces rollouts --follow` beside a trainer of verl with trainer.rollout_data_dir=rollouts
    - `cairn import traces outputs/grpo --reward correct --reward format=0.2`
    """
    from cairn.flows.traces.importing import ImportedRun, Importer, default_run, find_format, open_imported
    from cairn.storage.ledger.layout import check_name
    from cairn.storage.ledger.leases import Outcome
    from cairn.storage.ledger.manifest import Imported
    from cairn.storage.opening import open_for_runs

    found = find_format(source, format)
    weights = _weights(rewards or [])
    if weights and found.name != TraceFormat.TRL:
        raise BadInput(
            f"--reward chooses columns of TRL's files, but {source} is in the format {found.name}: leave it out"
        )
    name = run or default_run(source)
    with bad_input(ValueError):
        check_name(name, "run")
    if not follow and not source.is_file() and not found.files(source):
        raise BadInput(f"{source} has no traces of {found.name}, which are {found.about}: name another path")
    imported = Imported(format=found.name, source=str(source.resolve()), rewards=weights)
    ledger = open_imported(open_for_runs(root.url), name, imported)
    lease = ledger.acquire(takeover)
    outcome = Outcome.FAILED
    importer = Importer(ledger, print_stderr, print_stderr)
    try:
        importer.resume()
        if follow:
            with _ended_by_signals() as ended:
                print_stderr(f"following {source}; Ctrl-C ends it")
                importer.follow(ended)
        else:
            importer.once()
        outcome = Outcome.COMPLETED
    finally:
        lease.release(outcome)
    result = ImportedRun(
        run=name,
        format=found.name,
        source=imported.source,
        iterations=importer.iterations,
        samples=importer.samples,
        problems=tuple(importer.problems),
    )
    return Shown(result, _lines(result, ledger.store.url), failed=bool(result.problems))


@contextmanager
def _ended_by_signals() -> Iterator[Event]:
    """Yield an event that Ctrl-C and SIGTERM set."""
    ended = Event()
    before = {one: signal.signal(one, lambda *_: ended.set()) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _weights(rewards: list[str]) -> Mapping[str, float]:
    weights = {}
    for one in rewards:
        name, equals, weight = one.partition("=")
        try:
            weights[name] = float(weight) if equals else 1.0
        except ValueError:
            raise BadInput(f"--reward {one} is not NAME or NAME=WEIGHT, such as format=0.2") from None
    return weights


def _lines(result: "ImportedRun", url: str) -> list[str]:
    from cairn.flows.reading.failure import Terminal

    line = Terminal(url).line
    lines = [
        f"run {result.run}: {result.iterations} iterations with {result.samples:,} samples added from {result.source}"
    ]
    if result.problems:
        lines.append(f"{len(result.problems)} problems, named above")
    return [*lines, f"look: {line('cairn', 'report', result.run)}; {line('cairn', 'show', result.run)}"]
