"""Limits on what a configuration read from a store may make this machine do.

Anyone who can write to a store can write a manifest with a correct digest: a digest detects damage, not forgery. So a
configuration from a store is trusted less than a recipe, which the user passes. Options with numbers, switches or one
of a fixed set of words can only change what is computed. What a store may set another option to follows from the
option's type, by its `FromStore`; options without one are the user's alone. See docs/security.md.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cairn.configs.errors import ConfigError
from cairn.configs.loader import released
from cairn.configs.plugins import code_files
from cairn.configs.schema.base import FromStore, Section
from cairn.configs.schema.run import RunConfig
from cairn.engines.rollout.plan import NAMES, kind_of
from cairn.engines.training.options import permitted as permitted_of_training
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.store.store import Store

SERVICES = "CAIRN_SERVICES"
"""Environment variable with comma-separated addresses to which configurations from a store may send samples."""
_RECIPE = "pass the recipe again with `cairn train RECIPE --run NAME`"


def recorded_config(
    ledger: Ledger, heir: RunConfig | None = None, recipe: RunConfig | None = None, made: Commit | None = None
) -> RunConfig:
    """Return a run's configuration for execution. Only this function and `require_trusted` lead from a store to engines
    and user code.

    Args:
        heir: configuration of the fork for which an ancestor's configuration is executed, in the fork's cluster.
        recipe: the recipe, where the user passed one: values that it contains too are trusted.
        made: a commit under whose configuration the caller works; by default that with which the run goes on.

    Raises:
        ConfigError: the configuration contains what a store may not set.
    """
    ledger.manifest.require_own("weights and no configuration")
    config = ledger.config if made is None else ledger.config_of(made)
    if heir is not None:
        fleet = config.fleet.model_copy(update={"ray_address": heir.fleet.ray_address})
        config = config.model_copy(update={"fleet": fleet})
    return require_trusted(config, ledger.store, recipe, of=f" of {ledger.run}")


def require_model_trusted(config: RunConfig, ledger: Ledger) -> None:
    """Raise ConfigError unless a store may name the models of the configuration, for callers that read nothing else of
    it."""
    problems = _problems(config, ledger.store, None, f" of {ledger.run}")
    if named := [problem for problem in problems if problem.startswith("model.")]:
        raise ConfigError(named)


def require_trusted(
    config: RunConfig,
    store: Store,
    recipe: RunConfig | None = None,
    *,
    overrides: Sequence[str] = (),
    of: str = "",
) -> RunConfig:
    """Return the configuration, released for the import of its user code.

    Args:
        recipe: the recipe, where the user passed one: values that it contains too are trusted.
        overrides: `a.b=value` of the user that the configuration contains, which are trusted too.
        of: the ledger, for messages.

    Raises:
        ConfigError: the configuration contains what a store may not set.
    """
    problems = _problems(config, store, recipe, of, overrides)
    if problems:
        raise ConfigError(problems)
    return released(config)


def _problems(
    config: RunConfig, store: Store, recipe: RunConfig | None, of: str, overrides: Sequence[str] = ()
) -> list[str]:
    by_user = tuple(f"{override.partition('=')[0].strip()}." for override in overrides)
    of_user = {} if recipe is None else {option: value for option, value, _ in _set_options(recipe)}
    problems = []
    for option, value, rule in _set_options(config):
        if f"{option}.".startswith(by_user) or (option in of_user and of_user[option] == value):
            continue
        if rule is FromStore.ENGINE_OPTIONS:
            refused = _refused_engine_options(option, value)
            limit = f"a store may not set {', '.join(refused)} there" if refused else None
        elif rule is None:
            limit = "a store may not set it"
        else:
            holds, limit = RULES[rule]
            if all(holds(one, store) for one in (value if isinstance(value, tuple) else (value,))):
                continue
        if limit is not None:
            shown = "set" if isinstance(value, Mapping) else repr(value)
            colon = "" if limit.endswith("or") else ":"
            problems.append(f"{option} is {shown} in the ledger{of}, and {limit}{colon} {_RECIPE}")
    return problems


# The rules.


def _is_code_at_hand(name: str, store: Store) -> bool:
    return "." not in name or code_at_hand(name, store) is not None  # a name without a dot is built in


def _is_outside_store(folder: str, store: Store) -> bool:
    return not _lies_in_store(Path(folder).expanduser().resolve(), store)


_DATA = re.compile(r"(simplecache::)?(file|local|https?|s3a?|gs|gcs|az|abfss?|hf)://")
"""File systems that only read bytes at an address. Other file systems of fsspec start programs, log in to other
machines, or read instructions from the file."""


def _is_plain_data(path: str, store: Store) -> bool:
    if "://" not in path and "::" not in path and not path.startswith("data:"):
        return True
    address = _DATA.match(path)
    return address is not None and "::" not in path[address.end() :]


_RESERVED = {"chat_template", "tools", "documents", "tokenizer_kwargs", "tokenize", "return_dict", "return_tensors"}


def _are_plain_arguments(arguments: Mapping[str, Any], store: Store) -> bool:
    plain = all(isinstance(argument, bool | int | float | str) for argument in arguments.values())
    return plain and not _RESERVED & arguments.keys()


_LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")
"""Address of this machine, and nothing after it."""


def _is_server_here(url: str, store: Store) -> bool:
    address = url.removeprefix("http://").removeprefix("https://").rstrip("/").removesuffix("/v1")
    return bool(_LOOPBACK.fullmatch(address))


def _is_service(url: str, store: Store) -> bool:
    allowed = [one.rstrip("/") for one in os.environ.get(SERVICES, "").split(",") if one]
    return bool(_LOOPBACK.fullmatch(url.partition("://")[2].partition("/")[0])) or url.rstrip("/") in allowed


def _is_working_folder(folder: str, store: Store) -> bool:
    path = Path(folder).expanduser().resolve()
    return _lies_in(path, Path.cwd()) and not _lies_in_store(path, store)


def _is_local_database(uri: str, store: Store) -> bool:
    return uri.startswith("sqlite:///") and "?" not in uri and _is_working_folder(uri.removeprefix("sqlite:///"), store)


RULES: Mapping[FromStore, tuple[Callable[[Any, Store], bool], str]] = {
    FromStore.TEXT: (lambda text, store: True, ""),
    FromStore.CODE: (
        _is_code_at_hand,
        (
            "a store may not name code outside the working folder: run in the code's folder, put that folder on "
            "PYTHONPATH, or"
        ),
    ),
    FromStore.MODEL_FOLDER: (_is_outside_store, "a store may not name a model among its own files"),
    FromStore.DATA: (
        _is_plain_data,
        "a store may only name data in a folder, or at http(s), S3, Google, Azure or Hugging Face",
    ),
    FromStore.TEMPLATE_ARGUMENTS: (
        _are_plain_arguments,
        "a store may only pass numbers, switches and text to a chat template, not a template",
    ),
    FromStore.WORDS: (
        lambda values, store: all(map(_is_plain, values.values())),
        "a store may only set numbers, switches and single words there, which name neither files nor modules",
    ),
    FromStore.SERVER: (_is_server_here, "a store may not send weights or samples to another machine"),
    FromStore.SERVICE: (
        _is_service,
        f"a store may only send samples to this machine and to the addresses in the environment variable {SERVICES}: "
        "add it there, or",
    ),
    FromStore.CLUSTER: (
        lambda address, store: address in ("auto", "local") or bool(_LOOPBACK.fullmatch(address)),
        "a store may not name a cluster of another machine: join this machine to it and use `auto`, or",
    ),
    FromStore.API_KEY_NAME: (
        lambda name, store: name.endswith("API_KEY"),
        "a store may only name a secret whose name ends in API_KEY",
    ),
    FromStore.OUTPUT_FOLDER: (
        _is_working_folder,
        "a store may only write files below the working folder: run in that folder, or",
    ),
    FromStore.DATABASE: (
        _is_local_database,
        "a store may only write metrics into a file below the working folder",
    ),
}
"""For each type of options, whether a store may set a value, and the limit in words. `ENGINE_OPTIONS` follow from the
engines' own lists."""


_WORD = re.compile(r"[A-Za-z0-9_+-]{0,64}")
"""A word that is neither a file, nor an address, nor a module inside a package."""


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a switch, a word, or a list of these."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) and not isinstance(item, list | tuple) for item in value)
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and bool(_WORD.fullmatch(value)))


def _refused_engine_options(option: str, values: Mapping[str, Any]) -> list[str]:
    """Return names of an engine's own options that a store may not set, or not to this value."""
    option = ".".join(part for part in option.split(".") if not part.isdecimal())
    of_training = permitted_of_training()
    if option in of_training:
        return sorted(values.keys() - of_training[option])
    permitted = next(kind_of(name).permitted[option] for name in NAMES if option in kind_of(name).permitted)
    return sorted(name for name, value in values.items() if name not in permitted or not _is_plain(value))


# Files.


def is_at_hand(source: Path, store: Store) -> bool:
    """Whether a file is in the working directory or in a folder of PYTHONPATH, but not in the Python installation and
    not in a local store.

    A store below such a folder is excluded as a whole. Of a store around such a folder, only the folders that Cairn
    creates in it are excluded.
    """
    folders = [Path.cwd(), *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
    others = [Path(sys.prefix), Path(sys.base_prefix), *_folders(store)]
    root = Path(store.url).resolve()
    around = [folder for folder in folders if _lies_in(folder.resolve(), root) or not _lies_in(source, root)]
    return any(_lies_in(source, folder) for folder in around) and not any(_lies_in(source, other) for other in others)


def code_at_hand(name: str, store: Store) -> str | None:
    """Return a name of code that came from a store, for import; None where it is not the user's own code in a working
    folder."""
    files = code_files(name)
    return str(name) if files and all(is_at_hand(file, store) for file in files) else None


def _folders(store: Store) -> list[Path]:
    """Return all folders that Cairn writes in a store."""
    return [Path(store.url) / folder for folder in layout.ROOT_FOLDERS]


def _lies_in_store(path: Path, store: Store) -> bool:
    return any(_lies_in(path, folder) for folder in _folders(store))


def _lies_in(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder.resolve())


# Options.


def free_options(section: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, FromStore | None]:
    """Return the options that may hold more than numbers, switches and words of a fixed set, each with what a store may
    set. Options of list items appear without their index."""
    options: dict[str, FromStore | None] = {}
    for name, field in section.model_fields.items():
        if below := sections_in(field.annotation):
            for inner in below:
                options |= free_options(inner, f"{prefix}{name}.")
        elif not _is_closed(field.annotation):
            options[f"{prefix}{name}"] = _rule_of(field)
    return options


def _set_options(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, FromStore | None]]:
    """Yield the `free_options` of a configuration that are not at their defaults and not null, with their values."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _set_options(value, f"{prefix}{name}.")
        elif sections_in(field.annotation) and isinstance(value, tuple):
            for index, member in enumerate(value):
                yield from _set_options(member, f"{prefix}{name}.{index}.")
        elif not _is_closed(field.annotation) and value not in (None, field.get_default(call_default_factory=True)):
            yield f"{prefix}{name}", value, _rule_of(field)


def _rule_of(field: FieldInfo) -> FromStore | None:
    return next((mark for mark in _marks([*field.metadata, field.annotation]) if isinstance(mark, FromStore)), None)


def _marks(annotations: Any) -> Iterator[Any]:
    for annotation in annotations:
        yield annotation
        yield from _marks(get_args(annotation))


def sections_in(annotation: Any) -> list[type[Section]]:
    """Return the sections that a type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def _is_closed(annotation: Any) -> bool:
    """Whether a type holds only numbers, switches and words of a fixed set."""
    if get_origin(annotation) is Literal:
        return True
    if get_origin(annotation) is Annotated:
        return _is_closed(get_args(annotation)[0])
    if arguments := get_args(annotation):
        return all(argument is Ellipsis or _is_closed(argument) for argument in arguments)
    return annotation in (bool, int, float, type(None))
