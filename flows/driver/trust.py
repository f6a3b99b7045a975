"""Limits on what a configuration read from a store may make this machine do.

Anyone who can write to a store can write a manifest with a correct digest: a digest detects damage, not forgery. So a
configuration from a store is trusted less than a recipe, which the user passes. Options with numbers, switches or one
of a fixed set of words can only change what is computed. For every other option, `RULES` defines the values that a
store may set; a store may not set options without a rule. See docs/security.md.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from cairn.configs.errors import ConfigError
from cairn.configs.kinds import OPTIONS
from cairn.configs.loader import from_manifest, released
from cairn.configs.plugins import code_files
from cairn.configs.schema.base import Section
from cairn.configs.schema.run import RunConfig
from cairn.engines.rollout.plan import NAMES, kind_of
from cairn.engines.training.options import permitted as permitted_of_training
from cairn.storage.ledger import layout
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.store.store import Store

SERVICES = "CAIRN_SERVICES"
"""Environment variable with comma-separated addresses to which configurations from a store may send samples."""

Rule = Callable[[Any, Store], str | None]
"""Function of (value, store it was read from): returns why a store may not set the value, and what to do instead; None
if it may."""

GIVE_THE_RECIPE = "give the recipe again with `cairn train RECIPE --run NAME`"


def recorded_config(ledger: Ledger, heir: RunConfig | None = None, given: RunConfig | None = None) -> RunConfig:
    """Return a run's configuration for execution. Only this function and `require_trusted` lead from a store to engines
    and user code.

    Args:
        heir: configuration of the fork for which an ancestor's configuration is executed, in the fork's cluster.
        given: the recipe, where the user passed one: values that it contains too are trusted.

    Raises:
        ConfigError: the configuration contains what a store may not set.
    """
    config = from_manifest(ledger.manifest.config)
    if heir is not None:
        fleet = config.fleet.model_copy(update={"ray_address": heir.fleet.ray_address})
        config = config.model_copy(update={"fleet": fleet})
    return require_trusted(config, ledger.store, given, of=f" of {ledger.run}")


def require_model_trusted(config: RunConfig, ledger: Ledger) -> None:
    """Raise ConfigError unless a store may name the models of the configuration, for callers that read nothing else of
    it."""
    problems = _problems(config, ledger.store, None, f" of {ledger.run}")
    if named := [problem for problem in problems if problem.startswith("model.")]:
        raise ConfigError(named)


def require_trusted(config: RunConfig, store: Store, given: RunConfig | None = None, *, of: str = "") -> RunConfig:
    """Return the configuration, released for the import of its user code.

    Raises ConfigError where it sets what a store may not set and the recipe `given` does not contain. `of` names the
    ledger in messages.
    """
    problems = _problems(config, store, given, of)
    if problems:
        raise ConfigError(problems)
    return released(config)


def _problems(config: RunConfig, store: Store, given: RunConfig | None, of: str) -> list[str]:
    users = {} if given is None else {option: value for option, value, _ in _free_options(given)}
    problems = []
    for option, value, default in _free_options(config):
        if value == default or (option in users and users[option] == value):
            continue
        why = RULES.get(_general(option), _only_the_user)(value, store)
        if why is not None:
            shown = "set" if isinstance(value, Mapping) else repr(value)
            problems.append(f"{option} is {shown} in the ledger{of}, and {why}")
    return problems


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


def free_options(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Return options of a configuration that contain free text, mappings, or lists of these. Options of list items
    appear without their index."""
    found = []
    for name, field in section.model_fields.items():
        below = _sections_in(field.annotation)
        if below:
            found += [option for inner in below for option in free_options(inner, f"{prefix}{name}.")]
        elif not _is_closed(field.annotation):
            found.append(f"{prefix}{name}")
    return found


def _anything(value: Any, store: Store) -> None:
    """Allow any value: it is looked up, compared or shown, and can only change what is computed."""


def _only_the_user(value: Any, store: Store) -> str:
    return f"a store may not set it: {GIVE_THE_RECIPE}"


def _code(value: str | tuple[str, ...] | None, store: Store) -> str | None:
    names = [value] if isinstance(value, str) else value or ()
    if all("." not in name or code_at_hand(name, store) for name in names):  # without a dot it is one of Cairn's own
        return None
    return (
        "a store may name no code outside the folder one stands in: go there, put the code's folder on PYTHONPATH, or "
        f"{GIVE_THE_RECIPE}"
    )


def _model_folder(value: str | None, store: Store) -> str | None:
    if value is None or not _lies_in_store(Path(value).expanduser().resolve(), store):
        return None
    return f"a store may name no model among its own files: {GIVE_THE_RECIPE}"


_DATA = re.compile(r"(simplecache::)?(file|local|https?|s3a?|gs|gcs|az|abfss?|hf)://")
"""File systems that only read bytes at an address. Other file systems of fsspec start programs, log in to other
machines, or read instructions from the file."""


def _data(value: str, store: Store) -> str | None:
    is_url = "://" in value or "::" in value or value.startswith("data:")
    address = _DATA.match(value)
    if not is_url or (address is not None and "::" not in value[address.end() :]):
        return None
    return f"a store may name data in a folder, at http(s), S3, Google's, Azure's or Hugging Face's: {GIVE_THE_RECIPE}"


def _template_arguments(value: Mapping[str, Any], store: Store) -> str | None:
    own = {"chat_template", "tools", "documents", "tokenizer_kwargs", "tokenize", "return_dict", "return_tensors"}
    if not own & value.keys() and all(isinstance(item, bool | int | float | str) for item in value.values()):
        return None
    return f"a store may hand a chat template numbers, switches and text, and no template: {GIVE_THE_RECIPE}"


_WORD = re.compile(r"[A-Za-z0-9_+-]{0,64}")
"""A word that is neither a file, nor an address, nor a module inside a package."""


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a switch, a word, or a list of these."""
    if isinstance(value, list | tuple):
        return all(is_plain(item) and not isinstance(item, list | tuple) for item in value)
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and bool(_WORD.fullmatch(value)))


def _among(permitted: frozenset[str], may_hold: Callable[[Any], bool]) -> Rule:
    """Return a rule for an engine's own options: a store may set the permitted ones, to values that `may_hold`
    accepts."""

    def rule(value: Mapping[str, Any] | None, store: Store) -> str | None:
        names = sorted(name for name, held in (value or {}).items() if name not in permitted or not may_hold(held))
        return f"a store may not set {', '.join(names)} there: {GIVE_THE_RECIPE}" if names else None

    return rule


def _of_engines() -> dict[str, Rule]:
    served = {option: names for engine in NAMES for option, names in kind_of(engine).permitted.items()}
    return {option: _among(names, is_plain) for option, names in served.items()} | {
        option: _among(names, lambda value: True) for option, names in permitted_of_training().items()
    }


def _servers(value: tuple[str, ...], store: Store) -> str | None:
    if all(_HERE.fullmatch(url.removeprefix("http://").removeprefix("https://").rstrip("/")) for url in value):
        return None
    return f"a store may have weights sent to no other machine: {GIVE_THE_RECIPE}"


def _teacher(value: str | None, store: Store) -> str | None:
    if value is None or _servers((value.removesuffix("/v1"),), store) is None:
        return None
    return f"a store may have samples sent to no other machine: {GIVE_THE_RECIPE}"


def _service(value: str | None, store: Store) -> str | None:
    named = [url.rstrip("/") for url in os.environ.get(SERVICES, "").split(",") if url]
    address = "" if value is None else value.partition("://")[2].partition("/")[0]
    if value is None or _HERE.fullmatch(address) or value.rstrip("/") in named:
        return None
    return (
        f"a store may have samples sent to this machine and to the addresses in the environment variable {SERVICES} "
        f"alone: put it there, or {GIVE_THE_RECIPE}"
    )


def _key_name(value: str | None, store: Store) -> str | None:
    if value is None or value.endswith("API_KEY"):
        return None
    return f"a store may name no secret but one whose name ends in API_KEY: {GIVE_THE_RECIPE}"


def _cluster(value: str | None, store: Store) -> str | None:
    if value is None or value in ("auto", "local") or _HERE.fullmatch(value):
        return None
    return (
        f"a store may name no cluster of another machine: join this machine to it and use `auto`, or {GIVE_THE_RECIPE}"
    )


def _written_folder(value: str | None, store: Store) -> str | None:
    path = None if value is None else Path(value).expanduser().resolve()
    if path is None or (_lies_in(path, Path.cwd()) and not _lies_in_store(path, store)):
        return None
    return f"a store may have files written below the folder one stands in alone: go there, or {GIVE_THE_RECIPE}"


def _written_database(value: str, store: Store) -> str | None:
    if value.startswith("sqlite:///") and "?" not in value:
        return _written_folder(value.removeprefix("sqlite:///"), store)
    return f"a store may have metrics written into a file below the folder one stands in alone: {GIVE_THE_RECIPE}"


_ROW: dict[str, Rule] = {
    "input_key": _anything,
    "label_key": _anything,
    "metadata_key": _anything,
    "tool_key": _anything,
    "multimodal_keys": _anything,
    "label_pattern": _anything,
    "apply_chat_template_kwargs": _template_arguments,
    "path": _data,
}

RULES: Mapping[str, Rule] = {
    "approval.eval_drop.benchmark": _anything,
    **dict.fromkeys(OPTIONS, _code),
    "model.path": _model_folder,
    "model.ref_path": _model_folder,
    "model.teacher_path": _model_folder,
    "model.critic_path": _model_folder,
    "model.teacher_url": _teacher,
    "model.teacher_name": _anything,
    **{f"data.{name}": rule for name, rule in _ROW.items()},
    **{f"data.mixture.{name}": rule for name, rule in _ROW.items()},
    "data.mixture.name": _anything,
    **dict.fromkeys(("data.response_key", "data.chosen_key", "data.rejected_key"), _anything),
    **_of_engines(),
    "rollout.external_urls": _servers,
    "rollout.rollout_stop": _anything,
    "reward.rm_type": _anything,  # one of Cairn's own, or refused when it is looked up
    "reward.rm_type_key": _anything,
    "reward.reward_key": _anything,
    "algorithm.gdpo_reward_keys": _anything,
    "reward.rm_url": _service,
    "reward.rm_api_key_env": _key_name,
    "reward.judge.url": _service,
    "reward.judge.api_key_env": _key_name,
    **{f"reward.judge.{name}": _anything for name in ("model", "template", "system")},
    "reward.judge.pattern": _only_the_user,  # one that never ends would keep the driver
    "reward.reward_model.path": _model_folder,
    "reward.code.bwrap": _only_the_user,  # programs of this machine, which run
    "reward.code.python": _only_the_user,
    **dict.fromkeys(  # programs of this machine, which run
        [f"rollout.tool_options.{name}" for name in ("python.bwrap", "python.python", "shell.bwrap")], _only_the_user
    ),
    "rollout.tool_options.search.corpus": _data,
    **dict.fromkeys([f"rollout.tool_options.search.{name}" for name in ("text_key", "title_key")], _anything),
    "rollout.buffer_key": _anything,
    "retry.grader.errors": _anything,  # names that are compared with those of exceptions, never imported
    **dict.fromkeys(("training.only_train_params_name_list", "training.freeze_params_name_list"), _anything),
    "training.lora.target_modules": _anything,
    **{f"eval.benchmarks.{name}": rule for name, rule in _ROW.items()},
    "eval.benchmarks.name": _anything,
    "eval.benchmarks.rm_type": _anything,
    "fleet.ray_address": _cluster,
    "fleet.update_weight_disk_dir": _written_folder,
    "tracking.tensorboard_dir": _written_folder,
    "tracking.wandb_dir": _written_folder,
    "tracking.wandb_project": _anything,
    "tracking.wandb_group": _anything,
    "tracking.wandb_team": _only_the_user,  # whom metrics and configuration are sent to, and which server
    "tracking.wandb_host": _only_the_user,
    "tracking.mlflow_tracking_uri": _written_database,
    "tracking.mlflow_experiment": _anything,
    "tracking.prometheus_host": _only_the_user,
}
"""Rule for every option that can contain more than a number, a switch or one of a fixed set of words."""

_HERE = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")
"""Address of this machine, and nothing after it."""


def _free_options(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the options of `free_options` for a configuration, with values and defaults."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _free_options(value, f"{prefix}{name}.")
        elif _sections_in(field.annotation) and isinstance(value, tuple):
            for index, member in enumerate(value):
                yield from _free_options(member, f"{prefix}{name}.{index}.")
        elif not _is_closed(field.annotation):
            yield f"{prefix}{name}", value, field.get_default(call_default_factory=True)


def _general(option: str) -> str:
    """Return an option of a list item without its index."""
    return ".".join(part for part in option.split(".") if not part.isdecimal())


def _sections_in(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections_in(argument)]


def _is_closed(annotation: Any) -> bool:
    """Whether a type holds only numbers, switches and words of a fixed set."""
    if get_origin(annotation) is Literal:
        return True
    if arguments := get_args(annotation):
        return all(argument is Ellipsis or _is_closed(argument) for argument in arguments)
    return annotation in (bool, int, float, type(None))


def _folders(store: Store) -> list[Path]:
    """Return all folders that Cairn writes in a store."""
    return [Path(store.url) / folder for folder in layout.FOLDERS]


def _lies_in_store(path: Path, store: Store) -> bool:
    return any(_lies_in(path, folder) for folder in _folders(store))


def _lies_in(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder.resolve())
