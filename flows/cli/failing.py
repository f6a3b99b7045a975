"""The box in which a failed command ends: what happened, the commonest error, what stands, and what to type next."""

import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from json import dumps
from typing import TYPE_CHECKING

import typer

from cairn.configs.errors import Failure, message_of
from cairn.flows.cli.app import describe, exit_code
from cairn.flows.cli.command import FAILED, Root
from cairn.flows.cli.printing import print_stderr
from cairn.flows.text import shortened

if TYPE_CHECKING:
    from cairn.flows.reading.failure import RunFailure, Terminal
    from cairn.storage.store.store import Store

_MEANT = re.compile(r"(\S+) is not an option; did you mean (\S+)\?$")
_LONGEST = 8000
"""Number of characters after which a message is cut."""
_WIDTH = 80
"""Number of characters of the box's lines."""


@contextmanager
def ending_in_box(root: Root, run: str, words: Sequence[str]) -> Iterator[None]:
    """End the command with a box, and the exit code of the error, where the block fails to start or drive a run.

    `words`: the command, without `--store` and `--takeover`.
    """
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        from cairn.flows.reading.failure import OUT_OF_MEMORY

        code = exit_code(error)
        if code is None and not OUT_OF_MEMORY.search(message_of(error)):
            print_stderr("".join(traceback.format_exception(error)).rstrip())
        failure, owned = _failure(root, run, error, words)
        print_stderr("\n".join(box_lines(f"run {run} {'failed' if owned else 'did not start'}", failure)))
        raise typer.Exit(FAILED if code is None else code) from error


def going_on(store: "Store", run: str, words: Sequence[str]) -> str:
    """Return the command that continues a run of this process: without the recipe, where a store may name all that the
    run uses. `words`: the command that drives it."""
    from cairn.flows.driver.session import is_resumable
    from cairn.flows.reading.failure import Terminal
    from cairn.storage.ledger.leases import Holder
    from cairn.storage.ledger.ledger import Ledger

    terminal = Terminal.of(store, Holder.this_process())
    with suppress(FileNotFoundError, Failure):  # interrupted before there was a run
        if is_resumable(Ledger.open(store, run)):
            return terminal.line("cairn", "resume", run)
    return terminal.line(*words)


def box_lines(title: str, failure: "RunFailure") -> Iterator[str]:
    """Yield the lines of a box. A command has a line of its own, without a frame around it, to be copied."""
    facts = failure.facts()
    width = max(len(name) for name, _ in facts) + 2
    yield f"━━ {title} ".ljust(_WIDTH, "━")
    for name, text in facts:
        first, *others = text.split("\n")
        yield f"{name.ljust(width)}{first}"
        yield from (f"{' ' * width}{other}" for other in others)
    for name, commands in (("next", failure.next), ("or", failure.instead)):
        if commands:
            yield name
            yield from (f"  {command}" for command in commands)
    yield "━" * _WIDTH


def _failure(root: Root, run: str, error: Exception, words: Sequence[str]) -> "tuple[RunFailure, bool]":
    """Return why the command failed, and whether its driver owned the run: then it is as the ledger records it."""
    from cairn.flows.reading.failure import RunFailure, Terminal, free_name
    from cairn.flows.reading.views import own_failure, run_status
    from cairn.storage.ledger.leases import Holder
    from cairn.storage.store.errors import RunDiffers, StoreRefused

    own = Holder.this_process()
    url = _without_keys(root.url) if "://" in root.url else os.path.abspath(root.url)
    terminal = Terminal(url, own.folder, own.variables)
    instead: tuple[str, ...] = ()
    try:
        if (failure := own_failure(root.store, run, error)) is not None:
            return failure, True
        status = run_status(root.store, run)
        stands = f"{status.iterations} of {status.num_rollout} iterations, {status.state}: run {run} is as it was"
        if isinstance(error, RunDiffers) and status.iterations:
            new = free_name(root.store, run)
            options = [
                word
                for option, _, value in error.differences
                if not option.startswith("digest of ")
                for word in ("--set", f"{option}={dumps(value, ensure_ascii=False)}")
            ]
            fork = terminal.line("cairn", "fork", f"{run}@{status.iterations - 1}", new, *options)
            instead = fork, terminal.line("cairn", "resume", new)
    except (FileNotFoundError, StoreRefused):
        stands = "nothing was started"
    except Exception:  # which may be what the command failed of
        stands = None
    following = tuple(_next(error, root, run, terminal, words))
    kind, what = type(error).__name__, shortened(describe(error), _LONGEST)
    if exit_code(error) is None:
        what = f"{kind}: {what}" if what else kind
    return RunFailure(what=what or kind, stands=stands, next=following, instead=instead), False


def _without_keys(url: str) -> str:
    """Return a store's address without credentials, which belong into the environment."""
    from cairn.configs.schema.base import has_credentials

    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}" if has_credentials(url) else url


def _next(error: Exception, root: Root, run: str, terminal: "Terminal", words: Sequence[str]) -> Iterator[str]:
    """Yield the commands after an error before the run began. `words`: the command that failed."""
    from cairn.configs.errors import BadInput, ConfigError
    from cairn.flows.reading.failure import free_name, train_command, without
    from cairn.storage.store.errors import LeaseHeld, RunDiffers, StoreRefused

    if isinstance(error, LeaseHeld):
        yield terminal.line("cairn", "status", run)
        yield terminal.line(*words, "--takeover")
    elif isinstance(error, RunDiffers) and words[1] == "train":
        yield terminal.line(*without(words, "--run"), "--run", free_name(root.store, run))
    elif isinstance(error, RunDiffers):
        yield train_command(root.store, run, free_name(root.store, run)) or terminal.line("cairn", "status", run)
    elif isinstance(error, ConfigError) and words[1] == "resume":
        yield train_command(root.store, run) or terminal.line(*words)
    elif isinstance(error, BadInput) and not isinstance(error, StoreRefused) and words[1] == "train":
        problems: Sequence[str] = getattr(error, "problems", ())
        meant = {found[1]: found[2] for problem in problems if (found := _MEANT.match(problem))}
        recipe = [_corrected(word, meant) for word in without(words, "--run")[2:]]
        yield replace(terminal, url=os.getcwd()).line("cairn", "validate", *recipe)
    else:
        yield terminal.line(*words)


def _corrected(word: str, meant: Mapping[str, str]) -> str:
    option, equals, value = word.partition("=")
    return f"{meant.get(option, option)}{equals}{value}"
