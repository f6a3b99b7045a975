"""The application that commands register with, the options that they share, and the exit codes of errors.

Exit codes: 0 done, 1 a run failed or a ledger has findings, 2 bad input, 3 the run waits for a person's approval or was
rejected, 75 preempted (`cairn resume` continues the run), 130 interrupted, 143 `cairn up` was terminated.
"""

import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cairn.flows.cli.printing import tell
from cairn.flows.driver.signals import INTERRUPTED

FAILED = 1
BAD_INPUT = 2
TERMINATED = 143

StoreOption = Annotated[
    str,
    typer.Option(
        "--store", envvar="CAIRN_STORE", metavar="URL", help="Root of the ledger: a folder or s3://bucket/prefix."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run; `cairn runs` lists them.")]

OptionalRunArgument = Annotated[str | None, typer.Argument(metavar="RUN", help="Name of the run.")]
EvalsOption = Annotated[bool, typer.Option("--evals", help="The results of evaluations, instead of a run.")]


class BadInput(Exception):
    """Input that does not exist or makes no sense. The message is one clear sentence."""


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Raise BadInput where the path that the user named cannot be written. The error of a full disk is raised as it
    is."""
    from cairn.storage.store.errors import lacks_space

    try:
        yield
    except OSError as error:
        if lacks_space(error) or not _is_of(place.absolute(), error.filename):
            raise
        raise BadInput(f"{place} cannot be written: {error.strerror}; use another path") from None


def _is_of(place: Path, file: Any) -> bool:
    """Whether a file is the place, is below it, is one of its parent folders, or is a temporary file next to it."""
    found = Path(os.fsdecode(file)).absolute() if isinstance(file, str | bytes) else None
    if found is None or place.is_relative_to(found):
        return found is not None
    return found.is_relative_to(place.parent) and place.name in found.relative_to(place.parent).parts[0]


class _Commands(TyperGroup):
    """Group of commands. An expected error ends a command with a sentence on stderr and the error's exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a ? for what its encoding does not have
                stream.reconfigure(errors="replace")
        return super().main(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            tell("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            code = exit_code(error)
            if code is None:
                raise
            tell(describe(error))
            raise typer.Exit(code) from error


app = typer.Typer(
    name="cairn",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def cairn() -> None:
    """Durable reinforcement learning for language models.

    Every iteration of a run is a chain of committed steps. Wherever a run ended, it resumes from its last commit.
    """
    from cairn.engines.processes.deferred import defer_compiler
    from cairn.engines.processes.ports import spare_loopback

    spare_loopback()
    defer_compiler()


def exit_code(error: Exception) -> int | None:
    """Return the exit code of an error that is expected in a command; None for a bug, which keeps its traceback."""
    from cairn.configs.errors import BadData, ConfigError
    from cairn.configs.plugins import BadPlugin
    from cairn.engines.types.errors import BadModel, EngineError, GraderFailed, NotFinite, Superseded, TeacherUnusable
    from cairn.storage.store.errors import (
        BeingDeleted,
        Damaged,
        LeaseHeld,
        LeaseLost,
        NoSpace,
        Retired,
        RunDiffers,
        SharedWithForks,
        StaleCommits,
        StoreError,
        StoreRefused,
        lacks_space,
    )
    from cairn.tasks.selecting.filter import BatchNotFilled, NoSuchMetadata
    from cairn.tasks.selecting.sample_filters import NothingLeft
    from cairn.tasks.trainer.recovery import ReplayDiverged

    refused = (StoreRefused, RunDiffers, LeaseHeld, BeingDeleted, SharedWithForks)
    bad_input = (BadInput, ConfigError, BadModel, BadData, BadPlugin, *refused)
    of_batch = (BatchNotFilled, NoSuchMetadata, NothingLeft)
    run_failure = (TeacherUnusable, NotFinite, *of_batch, ReplayDiverged, GraderFailed)
    failure = (StoreError, Damaged, Retired, StaleCommits, LeaseLost, Superseded, EngineError, *run_failure)
    if isinstance(error, NoSpace) or (isinstance(error, OSError) and lacks_space(error)):
        return FAILED
    if isinstance(error, bad_input):
        return BAD_INPUT
    if isinstance(error, failure):
        return FAILED
    # No import: the module brings Prefect, which takes seconds.
    server = sys.modules.get("cairn.flows.orchestration.server")
    return FAILED if server is not None and isinstance(error, server.ServerFailed) else None


def describe(error: Exception) -> str:
    """Return the message of an error for people."""
    from cairn.flows.cli.tables import stale_lines
    from cairn.storage.store.errors import RunDiffers, lacks_space

    if isinstance(error, OSError) and lacks_space(error):
        return f"no space is left: {error}; free some"
    if not isinstance(error, RunDiffers):
        return str(error)
    lines = [
        f"  {field}: {_spell(recorded)} in the ledger, {_spell(given)} requested"
        for field, recorded, given in error.differences
    ]
    return "\n".join(
        [
            "the run exists with another configuration:",
            *lines,
            *stale_lines(error.stale),
            "Continue with the ledger's configuration (`cairn resume`), set the recorded values, choose another "
            "--run, or `cairn fork` the run at the last iteration to keep",
        ]
    )


def require_one(run: str | None, evals: bool) -> None:
    """Raise BadInput unless the user named a run or asked for the evaluations, and not both."""
    if (run is None) != evals:
        raise BadInput("name a run, or use --evals for the results of evaluations")


def mind_interrupts() -> None:
    """Let SIGINT stop this process even where it was ignored at the start, as in a background job of a script."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _spell(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
