"""The application that commands register with, and the exit codes of errors.

Exit codes: 0 done, 1 a run failed or a ledger has findings, 2 bad input, 3 the run waits for a person's approval or was
rejected, 75 preempted (`cairn resume` continues the run), 130 interrupted, 143 `cairn up` was terminated.
"""

import atexit
import io
import os
import sys
from contextlib import suppress
from json import dumps
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cairn.configs.errors import BadInput, Failure, message_of
from cairn.flows.cli.command import FAILED
from cairn.flows.cli.printing import print_stderr
from cairn.flows.driver.signals import INTERRUPTED

BAD_INPUT = 2
TERMINATED = 143


class _Commands(TyperGroup):
    """Group of commands. An expected error ends a command with a sentence on stderr and the error's exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # prints ? for a character that the encoding lacks
                stream.reconfigure(errors="replace")
        return super().main(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print_stderr("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            code = exit_code(error)
            if code is None:
                raise
            print_stderr(describe(error))
            raise typer.Exit(code) from error


app = typer.Typer(
    name="cairn",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(f"cairn {version('cairn-rl')}")
        raise typer.Exit()


@app.callback()
def cairn(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Durable reinforcement learning for language models.

    Every iteration of a run is a chain of committed steps. Wherever a run ended, it resumes from its last commit.

    `RUN@ITER/SAMPLE` names a sample everywhere, `RUN@ITER` an iteration, and `RUN` the newest. `--store` (or
    `CAIRN_STORE`) names the store, and `--json` prints for machines.
    """
    from cairn.engines.processes.deferred import defer_compiler
    from cairn.engines.processes.ports import bypass_proxy_for_loopback

    bypass_proxy_for_loopback()
    defer_compiler()


def main() -> None:
    """Run the command line: the program `cairn`.

    At its end the process does not take the interpreter down. Threads of libraries may still free what they have read,
    such as Arrow's, and one that needs the interpreter while it goes ends the process with SIGABRT and 134
    (https://github.com/apache/arrow/issues/34314). All else that happens at an exit does: threads are joined, and the
    functions of `atexit` are called.
    """
    code = FAILED

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError, AttributeError):  # the stream is closed, or never was open
                try:
                    stream.flush()
                except OSError:  # a full disk: what was printed is not whole
                    os._exit(code or FAILED)
        os._exit(code)

    atexit.register(leave)  # called last, since the commands' own functions are registered later
    try:
        app()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else FAILED if end.code else 0
        raise
    except KeyboardInterrupt:
        code = INTERRUPTED
        raise


def exit_code(error: Exception) -> int | None:
    """Return the exit code of an error that is expected in a command; None for a bug, which keeps its traceback."""
    from cairn.storage.store.errors import NoSpace, lacks_space

    if isinstance(error, NoSpace) or (isinstance(error, OSError) and lacks_space(error)):
        return FAILED
    return BAD_INPUT if isinstance(error, BadInput) else FAILED if isinstance(error, Failure) else None


def describe(error: Exception) -> str:
    """Return the message of an error for people."""
    from cairn.flows.cli.tables import stale_lines
    from cairn.storage.store.errors import RunDiffers, lacks_space

    if isinstance(error, OSError) and lacks_space(error):
        return f"no space is left: {error}; free some"
    if not isinstance(error, RunDiffers):
        return message_of(error)
    lines, asked = [], False
    for field, old, new in error.differences:
        if field.startswith("digest of "):
            if not field.endswith(":modules"):
                lines.append(f"  {field}: {str(old)[:4]}… in the ledger, {str(new)[:4]}… now")
            continue
        asked = True
        before, now = (dumps(value, ensure_ascii=False) for value in (old, new))
        lines.append(f"  {field}: {before} in the ledger, {now} requested")
    return "\n".join(
        [
            "the run exists with another configuration:",
            *lines,
            *stale_lines(error.stale),
            (
                "Continue with the ledger's configuration (`cairn resume`), set the recorded values"
                if asked
                else "Put back what the run was started with"
            )
            + ", choose another --run, or `cairn fork` the run at the last iteration to keep",
        ]
    )
