"""The form of a run in Prefect's interface: a recipe to choose, and every option of the configuration to change in it.

Prefect draws a form from the JSON schema of a flow's parameters, and its server refuses what the schema does not allow
before a run is made. So the form is the configuration's own schema, in which nothing is required: what is left out
stays as the recipe has it. Ranges, words to choose from and descriptions are those of `cairn.configs.schema`. A switch
is one of two words: a boolean that nobody touched the interface would send as false.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    create_model,
    model_serializer,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

import cairn.configs.schema
from cairn.configs.errors import ConfigError
from cairn.configs.loader import item_of, read, section_of
from cairn.configs.schema.evaluation import BenchmarkSampling, EngineOptions
from cairn.configs.schema.reward import RewardConfig
from cairn.configs.schema.run import RunConfig
from cairn.storage.ledger.layout import LONGEST_NAME, NAME_PATTERN

FOLDERS = (".", "recipes", "configs/recipes")
"""Where recipes of one's own are looked for, below the folder one stands in."""


def without_null(fields: dict[str, JsonSchemaValue]) -> None:
    """Let fields be empty rather than null: the interface would ask of which of the two types a value is."""
    for field in fields.values():
        if {"type": "null"} not in field.get("anyOf", ()):
            continue
        typed = [one for one in field.pop("anyOf") if one != {"type": "null"}]
        about = dict(field)
        field.clear()
        field.update(**(typed[0] if len(typed) == 1 else {"anyOf": typed}), **about)
    for field in fields.values():
        if field.get("default", ...) is None:
            del field["default"]


class Form(BaseModel):
    """Parameters that may each be left out."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core))
        without_null(schema.get("properties", {}))
        return schema

    @model_serializer(mode="wrap")
    def _without_what_is_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}

    def overrides(self, prefix: str = "") -> Iterator[str]:
        """What was filled in, as `section.option=value`."""
        for name in sorted(self.model_fields_set):
            value = getattr(self, name)
            if isinstance(value, Form):
                yield from value.overrides(f"{prefix}{name}.")
            elif value is not None:
                plain = type(self).__pydantic_serializer__.to_python(self, mode="json", include={name})[name]
                yield f"{prefix}{name}={json.dumps(plain)}"


def form_of(section: type[BaseModel], *, defaults: bool = True) -> type[Form]:
    """The form of a section of the configuration, and of those within it. `defaults`: say them, as what an empty field
    means."""
    fields: dict[str, Any] = {}
    for name, option in section.model_fields.items():
        inner = section_of(option) or _optional_section(option)
        held: Any = option.annotation if inner is None else form_of(inner, defaults=defaults)
        if held in (bool, bool | None):
            held = Annotated[bool, WithJsonSchema({"type": "string", "enum": ["true", "false"]})]
        for constraint in option.metadata:
            held = Annotated[held, constraint]
        about = inner.__doc__ if inner is not None else option.description
        text = " ".join((about or "").split()) + (_default(option, inner) if defaults else "")
        fields[name] = (Optional[held], Field(None, title=name, description=text))  # noqa: UP045
    return create_model(section.__name__, __base__=Form, __doc__=section.__doc__, **fields)


def _optional_section(option: FieldInfo) -> type[BaseModel] | None:
    """The section that a field may hold, and is null without; not that of the members of a list."""
    return item_of(option) if type(None) in get_args(option.annotation) else None


def _default(option: FieldInfo, inner: type[BaseModel] | None) -> str:
    if inner is not None or option.is_required():
        return ""
    value = option.get_default(call_default_factory=True)
    return "" if value is None else f" Default: {json.dumps(value, default=list)}."


if TYPE_CHECKING:
    Options = Form
    RewardOptions = Form
else:
    Options = form_of(RunConfig)
    """All options of a run."""
    RewardOptions = form_of(RewardConfig)
    """Those of its grader."""

EMPTY = Options()
"""The form as it is before anything is filled in."""

SAME_GRADER = RewardOptions()
"""The same of the grader's."""


def recipes(folder: Path) -> dict[str, Path]:
    """Recipes by name: those below the folder, relative to it, and Cairn's own, which give way to a file of the same
    name. A file that holds no sections of a configuration is none."""
    ours = Path(cairn.configs.schema.__file__).parent.parent / "recipes"
    found = {str(path.relative_to(ours)): path for path in sorted(ours.rglob("*.yaml"))}
    own = {str(path.relative_to(folder)): path for below in FOLDERS for path in sorted((folder / below).glob("*.yaml"))}
    of_this_folder = {path.resolve() for path in own.values()}
    found = {name: path for name, path in found.items() if path.resolve() not in of_this_folder}
    return {name: path for name, path in (own | found).items() if _is_recipe(path)}


def recipe_path(name: str) -> Path:
    """The file of a recipe that the form offers, or the one at that path."""
    return recipes(Path.cwd()).get(name, Path(name))


def _is_recipe(path: Path) -> bool:
    try:
        return {"model", "data", "rollout"} <= set(read(path))
    except ConfigError:
        return False


@cache
def _choices() -> tuple[str, ...]:
    return tuple(recipes(Path.cwd()))


class _Chosen:
    """Offers the recipes that there are where the schema is made; takes any text, since a file may come later."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(core) | ({"enum": list(_choices())} if _choices() else {})


Recipe = Annotated[str, _Chosen]
"""Name of a recipe."""

RunName = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$", max_length=LONGEST_NAME)]
"""Name of a run."""

RunNameOrNone = Annotated[str, Field(pattern=f"^({NAME_PATTERN})?$", max_length=LONGEST_NAME)]
"""The same, where it may be left out."""


# The form of an evaluation in Prefect's interface, made as that of a run is (`cairn.flows.deployments.forms`).


if TYPE_CHECKING:
    Sampling = Form
    Engine = Form
else:
    Sampling = form_of(BenchmarkSampling, defaults=False)
    """How responses are drawn."""
    Engine = form_of(EngineOptions)
    """What weights are evaluated with."""

UNCHANGED_SAMPLING = Sampling()
UNCHANGED_ENGINE = Engine()
"""The forms as they are before anything is filled in."""
