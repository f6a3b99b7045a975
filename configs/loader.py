"""Loading of recipes and `--set` overrides into a checked configuration. No other module makes a RunConfig from
text."""

import copy
import difflib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from cairn.configs.counterparts import TRAINERS, Counterpart, counterparts
from cairn.configs.errors import ConfigError
from cairn.configs.kinds import OPTIONS, canonical
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.base import RECORDED, UNCHECKED, has_credentials
from cairn.configs.schema.effect import Idle, idle_options
from cairn.configs.schema.run import RunConfig
from cairn.configs.yaml_file import parse_yaml, place_and_problem, read_mapping

# The schema as a flat list of options with dotted names, for error messages and documentation.


LIST_ITEM = "N"
"""Placeholder for a list position in a dotted name: `eval.benchmarks.N.path`."""


@dataclass(frozen=True)
class Option:
    """A leaf of the schema."""

    name: str
    """Dotted name from the root: `rollout.rollout_batch_size`."""
    values: str
    """Type and bounds of its values, in words."""
    default: Any
    """Default value; PydanticUndefined where a value is required."""
    description: str
    section: type[BaseModel]
    """The schema that declares the option."""

    @property
    def required(self) -> bool:
        return self.default is PydanticUndefined


def options(schema: type[BaseModel], prefix: str = "") -> Iterator[Option]:
    """Yield every option of `schema`, in its order of declaration."""
    for name, field in schema.model_fields.items():
        section, item = section_of(field), item_of(field)
        if section is not None:
            yield from options(section, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined
            description = " ".join((field.description or "").split())
            yield Option(f"{prefix}{name}", _values(field), default, description, schema)
        if item is not None:
            place = f"{name}.{LIST_ITEM}" if get_origin(field.annotation) is tuple else name
            yield from options(item, f"{prefix}{place}.")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds, or None."""
    return _model(field.annotation)


def item_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section of the members of a field's list, or of a nullable field; None where there is none."""
    return next((model for arg in get_args(field.annotation) if (model := _model(arg)) is not None), None)


def _model(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _values(field: FieldInfo) -> str:
    """Return the type and bounds of a field in words: `int ≥ 1`, `"a" or "b"`, `list of int`, `text or null`."""
    names = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}

    def spell(annotation: Any) -> str:
        if annotation in names:
            return names[annotation]
        if _model(annotation) is not None:
            return "section"
        args = get_args(annotation)
        origin = getattr(annotation, "__origin__", None)
        if hasattr(annotation, "__metadata__"):
            return spell(origin)
        if origin is tuple:
            return f"list of {'sections' if _model(args[0]) is not None else spell(args[0])}"
        if origin is dict:
            return "mapping"
        if args and not any(isinstance(arg, type) for arg in args):
            return ", ".join(f"`{arg}`" for arg in args)
        return " or ".join(spell(arg) for arg in args)

    bounds = [
        f"{sign} {getattr(constraint, bound):g}"
        for constraint in field.metadata
        for bound, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if getattr(constraint, bound, None) is not None
    ]
    return " ".join([spell(field.annotation), *bounds])


_OPTIONS = "options; it should begin with a section such as `model:`"


Note = Callable[[str], None]
"""Called with a sentence on each option that is left out because it has no effect."""


def _ignore(sentence: str) -> None:
    pass


def load(path: str | Path, overrides: Sequence[str] = (), note: Note = _ignore) -> RunConfig:
    """Return the configuration in a YAML file, with `a.b=value` overrides applied in order.

    Values of overrides are YAML; `eval.benchmarks.0.path=…` reaches into a list. Paths in the configuration stay as
    written, relative to the working directory. Raises ConfigError, which lists every problem at once.
    """
    return parse(_overridden(read(path), overrides), note=note)


def read(path: str | Path) -> dict[str, Any]:
    """Return the options in a YAML file, merged over those of the file that it names as its `base`.

    `base` is relative to the file's own folder. Sections and mappings are merged, everything else is replaced. Raises
    ConfigError where a file cannot be read.
    """
    path, derived = Path(path), [Path(path).resolve()]
    values = read_mapping(path, "recipes are in configs/recipes/", _OPTIONS)
    while "base" in values:
        base = values.pop("base")
        if not isinstance(base, str) or not base:
            raise ConfigError([f"{path}: base is {_spell(base)}; it must name another recipe, relative to this one"])
        base_path = path.parent / base
        if base_path.resolve() in derived:
            raise ConfigError([f"{path}: base is {base}, which itself has {path.name} as a base"])
        values = _merged(read_mapping(base_path, f"it is the base of {path}", _OPTIONS), values)
        path = base_path
        derived.append(path.resolve())
    return values


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings. Values of `above` override those of `below`."""
    merged = dict(below)
    for key, value in above.items():
        under = below.get(key)
        merged[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def parse(values: dict[str, Any], context: Mapping[str, bool] | None = None, note: Note = _ignore) -> RunConfig:
    """Check a nested mapping of options, as read from YAML, and return the configuration.

    An option that has no effect contradicts nothing: it is left out, with a note.

    Args:
        context: validation context, see `cairn.configs.schema.base`.

    Raises:
        ConfigError: lists every problem at once.
    """
    config, left_out = without_idle(values, context)
    for one in left_out:
        note(str(one))
    return config


def without_idle(values: dict[str, Any], context: Mapping[str, bool] | None = None) -> tuple[RunConfig, list[Idle]]:
    """Return the configuration of nested options, and those of them that were left out because they have no effect."""
    left_out: list[Idle] = []
    values = _by_usual_names(_with_recorded_names(values))
    while True:
        config = _validated(values, context)
        idle = [one for one in idle_options(config) if _holds(values, one.option)]
        if not idle:
            return config, left_out
        left_out += idle
        for one in idle:
            values = _without(values, one.option)


def _by_usual_names(values: dict[str, Any]) -> dict[str, Any]:
    """Take `training.engine: fsdp` for `torch`, and Megatron's `recompute_activations` and `context_parallel_size` for
    the options of the engine that does it."""
    section = values.get("training")
    if not isinstance(section, dict):
        return values
    training = {**section, "engine": "torch"} if section.get("engine") == "fsdp" else dict(section)
    if isinstance(wanted := training.get("recompute_activations"), bool):
        del training["recompute_activations"]
        if wanted and training.get("engine") == "megatron":
            training["megatron"] = {"recompute_granularity": "selective", **(training.get("megatron") or {})}
        elif wanted:
            training["gradient_checkpointing"] = True
    if training.get("engine") == "megatron" and (ranks := training.get("context_parallel_size", 1)) != 1:
        own = training.get("megatron") or {}
        if isinstance(own, dict) and "context_parallel_size" not in own:
            del training["context_parallel_size"]
            training["megatron"] = {**own, "context_parallel_size": ranks}
    return {**values, "training": training}


def _holds(values: Any, option: str) -> bool:
    """Whether nested options have one of a dotted name."""
    first, _, rest = option.partition(".")
    return isinstance(values, dict) and first in values and (not rest or _holds(values[first], rest))


def _without(values: dict[str, Any], option: str) -> dict[str, Any]:
    """Return nested options without one of a dotted name."""
    first, _, rest = option.partition(".")
    others = {key: value for key, value in values.items() if key != first}
    return {**others, first: _without(values[first], rest)} if rest else others


def _validated(values: dict[str, Any], context: Mapping[str, bool] | None) -> RunConfig:
    try:
        text = json.dumps(_without_empty_sections(values, RunConfig), default=str)
    except (ValueError, RecursionError):  # by an anchor, `&a [*a]`
        raise ConfigError(["the configuration cannot be written out: a value in it contains itself"]) from None
    try:
        # Strict JSON mode rejects text in place of a number and a boolean in place of a count, but accepts any list for
        # a tuple.
        return RunConfig.model_validate_json(text, strict=True, context=context)
    except ValidationError as error:
        raise ConfigError([_sentence(details) for details in error.errors(include_url=False)]) from None


def inherit(recorded: Mapping[str, Any], overrides: Sequence[str], note: Note = _ignore) -> RunConfig:
    """Return the configuration of a fork: its parent's manifest with `a.b=value` overrides applied.

    Names of code in it are Unchecked.
    """
    parent = from_manifest(recorded).model_dump(mode="json")
    values = _overridden(parent, overrides)
    _reset_clip_range(values, parent, _names(overrides))
    return parse(values, UNCHECKED, note)


def _reset_clip_range(values: dict[str, Any], parent: Mapping[str, Any], overridden: Collection[str]) -> None:
    """Give a fork the default clip range of its own loss where its parent has that of the parent's loss.

    An override of the clip range or of the whole section prevents this.
    """
    section, before = values["algorithm"], AlgorithmConfig.usual_clip_range(parent["algorithm"])
    named = {"algorithm", *(f"algorithm.{name}" for name in before)} & {*overridden}
    if not named and all(parent["algorithm"][name] == value for name, value in before.items()):
        section |= AlgorithmConfig.usual_clip_range(section)


def with_section(recorded: RunConfig, name: str, overrides: Sequence[str], example: str) -> RunConfig:
    """Return a recorded configuration with options of one section changed by `section.option=value`.

    Only the rules of that section are checked, for computations apart from the run. Names of code in the section are
    Unchecked. Raises ConfigError for options of other sections; `example` shows one of this section.
    """
    elsewhere = [override for override in overrides if not override.strip().startswith(f"{name}.")]
    if elsewhere:
        raise ConfigError(
            [
                f"--set {override}: only options of the section {name} can be changed here, such as {example}; "
                "`cairn fork` changes others"
                for override in elsewhere
            ]
        )
    schema, before = type(getattr(recorded, name)), recorded.model_dump(mode="json")
    after, overridden = _overridden(before, overrides), _names(overrides)
    _reset_clip_range(after, before, overridden)
    try:
        section = schema.model_validate_json(json.dumps(after[name], default=str), strict=True, context=UNCHECKED)
    except ValidationError as error:
        raise ConfigError([_sentence(details, (name,)) for details in error.errors(include_url=False)]) from None
    changed = recorded.model_copy(update={name: section})
    idle = [str(one) for one in idle_options(changed) if one.option in overridden]
    if idle:
        raise ConfigError(idle)
    return changed


def from_manifest(values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration in a run's manifest or terms, for reading only: names of code are Unchecked.

    Code that runs a configuration gets it from `cairn.flows.driver.trust`. Raises ConfigError.
    """
    try:
        return RunConfig.model_validate(values, context=RECORDED | UNCHECKED)
    except (ValidationError, AttributeError, TypeError) as error:
        details = error.errors(include_url=False) if isinstance(error, ValidationError) else []
        problems = [_sentence(one) for one in details] or ["it is not a configuration"]
        raise ConfigError([f"in the ledger: {problem}" for problem in problems]) from None


def released(config: RunConfig) -> RunConfig:
    """Return a configuration whose names of code may be imported.

    For `cairn.flows.driver.trust` only, which has compared them with what a store may set. Raises ConfigError where the
    configuration breaks a rule between options, which its reading does not check.
    """
    try:
        return RunConfig.model_validate(config.model_dump(mode="json"))
    except ValidationError as error:
        problems = [f"in the ledger: {_sentence(one)}" for one in error.errors(include_url=False)]
        raise ConfigError(problems) from None


def _names(overrides: Sequence[str]) -> set[str]:
    """Return the names of the options that `a.b=value` overrides set."""
    return {override.partition("=")[0].strip() for override in overrides}


def _overridden(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return nested options with `a.b=value` overrides applied."""
    changed = copy.deepcopy(dict(values))
    for setting in overrides:
        _apply(changed, setting)
    return changed


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one `a.b=value` in nested mappings and lists, and make missing sections."""
    name, equals, text = override.partition("=")
    name = name.strip()
    if has_credentials(override) or has_credentials(text):
        override = "…" if has_credentials(name) else f"{name}=…"
    if not equals or not name or "" in name.split("."):
        raise ConfigError([f"--set {override} is not of the form section.option=value"])
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError([f"--set {override}: the value is not YAML: {place_and_problem(error)}"]) from None
    *path, last = name.split(".")
    owner: Any = values
    for depth, key in enumerate(path):
        place = _place(owner, key, override, ".".join(path[:depth]))
        if isinstance(owner, dict) and owner.get(key) is None:
            owner[key] = {}
        owner = owner[place]
        if not isinstance(owner, dict | list):
            reached = ".".join(path[: depth + 1])
            raise ConfigError([f"--set {override}: {reached} holds {_spell(owner)}; it has no options"])
    owner[_place(owner, last, override, ".".join(path))] = value


def _place(owner: dict[str, Any] | list[Any], key: str, override: str, name: str) -> Any:
    """Return `key` as an index of `owner`."""
    if isinstance(owner, dict):
        return key
    if not key.isdecimal() or int(key) >= len(owner):
        raise ConfigError(
            [f"--set {override}: {name} is a list of {len(owner)}; {key} is not a position in it (counted from 0)"]
        )
    return int(key)


def _with_recorded_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return options with names of code as they are recorded: `cairn.configs.kinds.canonical`. Raises ConfigError."""
    values, problems = dict(values), list[str]()
    for option in OPTIONS:
        *sections, last = option.split(".")
        owners: list[Any] = [values]
        for section in sections:
            owners = [below for owner in owners for below in _copied(owner, section)]
        for owner in owners:
            named = owner.get(last)
            try:
                if isinstance(named, list):
                    owner[last] = [canonical(option, one) if isinstance(one, str) else one for one in named]
                elif isinstance(named, str):
                    owner[last] = canonical(option, named)
                    if owner[last] is None:  # the default is meant
                        del owner[last]
            except BadPlugin as error:
                problems.append(f"{option}: {error}")
    if problems:
        raise ConfigError(problems)
    return values


def _copied(owner: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Replace a section of `owner`, or each of a list of sections, by a copy. Return the copies."""
    below = owner.get(name)
    if isinstance(below, dict):
        owner[name] = dict(below)
        return [owner[name]]
    if isinstance(below, list):
        owner[name] = [dict(one) if isinstance(one, dict) else one for one in below]
        return [one for one in owner[name] if isinstance(one, dict)]
    return []


def _without_empty_sections(values: Any, schema: type[BaseModel]) -> Any:
    """Replace null sections by empty ones: YAML reads a section header with nothing under it as null."""
    if not isinstance(values, dict):
        return values
    sections = {name: section for name, field in schema.model_fields.items() if (section := section_of(field))}
    return {
        key: _without_empty_sections({} if value is None else value, sections[key]) if key in sections else value
        for key, value in values.items()
    }


class _Field(NamedTuple):
    """A place in the schema."""

    name: str
    is_section: bool
    description: str


def _locate(location: Sequence[int | str]) -> _Field:
    """Return the place in the schema to which a pydantic error's location leads."""
    schema: type[BaseModel] | None = RunConfig
    items: type[BaseModel] | None = None
    description = ""
    for key in location:
        if isinstance(key, int):
            schema, items = items, None
        elif schema is not None and key in schema.model_fields:
            field = schema.model_fields[key]
            description = " ".join((field.description or "").split())
            schema, items = section_of(field), item_of(field)
        else:
            schema = items = None
    return _Field(".".join(map(str, location)), schema is not None, description)


def _sentence(error: ErrorDetails, section: tuple[str, ...] = ()) -> str:
    """Return one problem as one sentence."""
    error["loc"] = (*section, *error["loc"])
    field = _locate(error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    match error["type"]:
        case "extra_forbidden":
            return _unknown(error["loc"], error["input"])
        case "missing":
            what = f": {field.description.partition('. ')[0].rstrip('.')}" if field.description else ""
            return f"{field.name} is required and missing{what}"
        case "value_error" if not field.name:
            return message
        case "value_error":
            return f"{field.name}: {message}" if field.is_section else f"{field.name} {message}"
        case "json_invalid":  # this module wrote the JSON
            return "the configuration holds half of a surrogate pair, which is not a character: correct its text"
        case "model_type" | "model_attributes_type":
            return f"{field.name} is {_spell(error['input'])}; it must be a section with options under it"
        case "bool_type":
            message = "must be true or false"
    must = re.sub(r"^\w+ should ", "must ", message)
    return f"{field.name} is {_spell(error['input'])}; it {must[0].lower()}{must[1:]}{_value_elsewhere(error)}"


def _value_elsewhere(error: ErrorDetails) -> str:
    """Return what a value is here that another trainer has for the option; empty where none has it."""
    name = ".".join(map(str, error["loc"]))
    for table, trainer in TRAINERS.items():
        for flag in counterparts(table).values():
            if name in flag.options[:1] and isinstance(error["input"], str) and error["input"] in flag.values:
                return f"; {trainer}'s {error['input']} is {flag.values[error['input']]} here"
    return ""


def _holds_credentials(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_holds_credentials, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and has_credentials(value)


def _unknown(location: Sequence[int | str], value: Any) -> str:
    name = ".".join(map(str, location))
    *sections, last = location
    if isinstance(value, dict) and not sections:
        known = [key for key, field in RunConfig.model_fields.items() if section_of(field)]
        close = difflib.get_close_matches(str(last).lower(), known, n=1) or known
        return f"{name} is not a section; did you mean {' or '.join(close)}?"
    nearest = _nearest(location)
    for trainer, flag in _elsewhere(location):
        if nearest is None or nearest.rpartition(".")[2] != flag.attribute.rpartition(".")[2]:
            return f"{name} is not an option; {trainer}'s {flag.flag} {_here(flag)}"
    if nearest is None:
        return f"{name} is not an option; docs/configuration.md lists all options"
    return f"{name} is not an option; did you mean {nearest}?"


def _elsewhere(location: Sequence[int | str]) -> Iterator[tuple[str, Counterpart]]:
    """Yield options of other trainers with this name, or this and the one before it, in the last parts of theirs."""
    words = [_word(key) for key in location]
    wanted = {words[-1], "_".join(words[-2:])}
    for table, trainer in TRAINERS.items():
        for flag in counterparts(table).values():
            if flag.attribute.rpartition(".")[2] in wanted:
                yield trainer, flag


def _here(flag: Counterpart) -> str:
    if flag.why:
        return f"has no counterpart: {flag.why}".replace("`", "")
    return f"is here: {'; '.join(filter(None, [' and '.join(flag.options), flag.how]))}".replace("`", "")


def _word(key: int | str) -> str:
    """Return an option's name in the spelling of this schema."""
    return re.sub(r"[-\s]", "_", str(key).strip("-")).lower().removeprefix("_")


def _nearest(location: Sequence[int | str]) -> str | None:
    """Return the option that was probably meant: one of the same or a similar name, preferably in the same section."""
    position = next((str(key) for key in location if isinstance(key, int)), LIST_ITEM)
    prefix = "".join(f"{key}." for key in location[:-1])
    word = _word(location[-1])
    names = [option.name.replace(LIST_ITEM, position) for option in options(RunConfig)]
    squeezed = word.replace("_", "")

    def score(name: str) -> float:
        own = name.rpartition(".")[2]
        begins = len(squeezed) > 3 and own.replace("_", "").startswith(squeezed)
        return difflib.SequenceMatcher(None, word, own).ratio() + 0.5 * begins + 0.1 * name.startswith(prefix)

    scores = {name: score(name) for name in names}
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] >= 0.7 else None


def _spell(value: Any) -> str:
    """Return a value in YAML spelling, shortened. A value that holds an address with credentials is not shown."""
    if _holds_credentials(value):
        return "a value with credentials"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"
