"""Common parts of commands: the options `--store` and `--json`, common arguments, and how a result is shown.

A command is a function that returns its result; `command` makes it one for Typer:

| the function | the command |
|---|---|
| its first parameter is `root: Root` | has `--store`; the function opens the store, or a run's ledger, from it |
| returns `Shown` | has `--json`; the result is printed as JSON or as text, and sets the exit code |
| has a parameter `json: JsonOption` | the function also learns whether JSON is printed |
"""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from cairn.configs.errors import BadInput
from cairn.flows.cli.printing import print_json, print_parts
from cairn.flows.reading.address import Address, parser

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cairn.storage.ledger.ledger import Ledger
    from cairn.storage.store.store import Store

FAILED = 1
"""Exit code: a run failed, or a command has found something wrong."""

STORE = "CAIRN_STORE"
"""Variable of the environment that `--store` defaults to."""


def complete_run(incomplete: str) -> list[str]:
    """Return the runs of the environment's store whose names begin so; completes arguments in a shell."""
    from cairn.storage.ledger.manifest import list_runs
    from cairn.storage.opening import open_store

    return [run for run in list_runs(open_store(os.environ.get(STORE) or ".")) if run.startswith(incomplete)]


StoreOption = Annotated[
    str,
    Option("--store", envvar=STORE, metavar="URL", help="Root of the ledger: a folder or s3://bucket/prefix."),
]
JsonOption = Annotated[bool, Option("--json", help="Print JSON for machines.")]
RunArgument = Annotated[
    str, Argument(metavar="RUN", help="Name of the run; `cairn runs` lists them.", autocompletion=complete_run)
]
IterationArgument = Annotated[
    Address,
    Argument(
        metavar="RUN[@ITER]",
        help="A run, and the number of an iteration from 0; the newest by default.",
        parser=parser("RUN[@ITER]"),
        autocompletion=complete_run,
    ),
]
SampleArgument = Annotated[
    Address,
    Argument(
        metavar="RUN[@ITER[/SAMPLE]]",
        help="A run, an iteration (the newest by default) and a sample: its number, or GROUP/INDEX.",
        parser=parser("RUN[@ITER[/SAMPLE]]", sample=True),
        autocompletion=complete_run,
    ),
]
SignersOption = Annotated[
    Path | None,
    Option("--signers", metavar="FILE", help="Lines of NAME KEY: one of them must have signed every commit."),
]


@dataclass(frozen=True)
class Root:
    """The store that `--store` names. It is opened when a command first needs it."""

    url: str

    @cached_property
    def store(self) -> "Store":
        """The store after it has responded: a command must not wait for a wrong endpoint as in an outage. Raises
        StoreRefused where there is no store."""
        from cairn.storage.opening import open_existing

        return open_existing(self.url, may_be_empty=True)

    def ledger(self, run: str) -> "Ledger":
        """Return the ledger of a run. Raises BadInput if the run does not exist."""
        from cairn.storage.ledger.ledger import Ledger

        with bad_input(FileNotFoundError, ValueError):
            return Ledger.open(self.store, run)


@dataclass(frozen=True)
class Shown:
    """Result of a command."""

    value: Any
    """For `--json`: JSON values, and models that become such."""
    text: "Iterable[RenderableType]" = ()
    """For people: one text or several, and tables. Not iterated over for `--json`."""
    failed: bool | Callable[[], bool] = False
    """Whether the command exits with 1; a function is called after the result is printed."""

    def show(self, json: bool) -> None:
        """Print the result, and end the command if it has failed."""
        if json:
            print_json(self.value)
        else:
            print_parts([self.text] if isinstance(self.text, str) else self.text)
        if self.failed() if callable(self.failed) else self.failed:
            raise typer.Exit(FAILED)


_STORE = inspect.Parameter("store", inspect.Parameter.KEYWORD_ONLY, default=".", annotation=StoreOption)
_JSON = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption)


def command(function: Callable[..., Shown | None]) -> Callable[..., None]:
    """Return a function for Typer: a command with the parameters of the function and the options that the module's
    table adds."""
    signature = inspect.signature(function)
    own = list(signature.parameters.values())
    takes_root = bool(own) and own[0].annotation is Root
    takes_json = "json" in signature.parameters
    added = [_JSON] * (signature.return_annotation is Shown and not takes_json) + [_STORE] * takes_root

    @wraps(function)
    def called(**arguments: Any) -> None:
        root = [Root(arguments.pop("store"))] if takes_root else []
        json = arguments["json"] if takes_json else arguments.pop("json", False)
        shown = function(*root, **arguments)
        if shown is not None:
            shown.show(json)

    called.__signature__ = inspect.Signature([*own[takes_root:], *added])  # type: ignore[attr-defined]
    called.__annotations__ = {}
    return called


@contextmanager
def bad_input(*errors: type[Exception]) -> Iterator[None]:
    """Raise BadInput where the block raises one of the errors, whose messages are about what the user passed."""
    try:
        yield
    except errors as error:
        raise BadInput(str(error)) from None


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Raise BadInput where the path that the user named cannot be written. The error of a full disk is raised as it
    is."""
    from cairn.storage.store.errors import lacks_space

    try:
        yield
    except OSError as error:
        if lacks_space(error) or not _concerns(place.absolute(), error.filename):
            raise
        raise BadInput(f"{place} cannot be written: {error.strerror}; use another path") from None


def _concerns(place: Path, file: Any) -> bool:
    """Whether a file is the place, is below it, is one of its parent folders, or is a temporary file next to it."""
    if not isinstance(file, str | bytes):
        return False
    path = Path(os.fsdecode(file)).absolute()
    if place.is_relative_to(path):
        return True
    return path.is_relative_to(place.parent) and place.name in path.relative_to(place.parent).parts[0]


def read_signers_of(file: Path | None) -> dict[str, str]:
    """Return names by key from the file that `--signers` names; an empty mapping without it."""
    if file is None:
        return {}
    from cairn.storage.upkeep.signatures import read_signers

    try:
        with bad_input(ValueError):
            return read_signers(file)
    except OSError as error:
        raise BadInput(f"the file of signers {file} cannot be read: {error.strerror}") from None
