"""The form of a run in Prefect's UI: a recipe to choose, the options that people change, and a box for all others.

Prefect renders a form from the JSON schema of a flow's parameters, and its server rejects values that the schema does
not allow before it creates a flow run. The fields come from the configuration's own schema, with ranges, choices and
descriptions, and are all optional: an omitted option keeps the recipe's value. The box takes lines of the form
`section.option=value`, as `--set` does. A switch is a choice of two strings, because an untouched boolean looks off in
the UI, whatever the recipe says.
"""

import json
from collections.abc import Iterator, Sequence
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

from cairn.configs.catalogue import recipe_files
from cairn.configs.errors import ConfigError
from cairn.configs.loader import item_of, read, section_of
from cairn.configs.schema.evaluation import BenchmarkSampling, EngineOptions
from cairn.configs.schema.reward import RewardConfig
from cairn.configs.schema.run import RunConfig
from cairn.storage.ledger.layout import LONGEST_NAME, NAME_PATTERN


def without_null(fields: dict[str, JsonSchemaValue]) -> None:
    """Make fields optional instead of nullable: for a nullable field the UI asks which of the two types the value
    has."""
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
    """Parameters that are all optional."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core))
        without_null(schema.get("properties", {}))
        return schema

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}

    def overrides(self, prefix: str = "") -> Iterator[str]:
        """Yield the values that were filled in, as `section.option=value`."""
        for name in sorted(self.model_fields_set):
            value = getattr(self, name)
            key = type(self).model_fields[name].alias or name
            if isinstance(value, Form):
                yield from value.overrides(f"{prefix}{key}.")
            elif value is not None:
                (plain,) = type(self).__pydantic_serializer__.to_python(self, mode="json", include={name}).values()
                yield f"{prefix}{key}={json.dumps(plain)}"


def form_of(section: type[BaseModel], *, defaults: bool = True) -> type[Form]:
    """Return the form of a configuration section and of its subsections. `defaults`: append the default of each option
    to its description, as the meaning of an empty field."""
    fields: dict[str, Any] = {}
    for name, option in section.model_fields.items():
        fields[name] = _field(name, option, defaults=defaults)
    return create_model(section.__name__, __base__=Form, __doc__=section.__doc__, **fields)


def _field(name: str, option: FieldInfo, *, defaults: bool) -> tuple[Any, Any]:
    """Return the annotation and the field of an option in a form."""
    inner = section_of(option) or _optional_section(option)
    annotation: Any = option.annotation if inner is None else form_of(inner, defaults=defaults)
    if annotation in (bool, bool | None):
        annotation = Annotated[bool, WithJsonSchema({"type": "string", "enum": ["true", "false"]})]
    for constraint in option.metadata:
        annotation = Annotated[annotation, constraint]
    about = inner.__doc__ if inner is not None else option.description
    text = " ".join((about or "").split()) + (_default(option, inner) if defaults else "")
    return Optional[annotation], Field(None, title=name, description=text)  # noqa: UP045


def _optional_section(option: FieldInfo) -> type[BaseModel] | None:
    """Return the section of a nullable field; None for other fields and for lists of sections."""
    return item_of(option) if type(None) in get_args(option.annotation) else None


def _default(option: FieldInfo, inner: type[BaseModel] | None) -> str:
    if inner is not None or option.is_required():
        return ""
    value = option.get_default(call_default_factory=True)
    return "" if value is None else f" Default: {json.dumps(value, default=list)}."


CHANGED_OFTEN = (
    "model.path",
    "data.path",
    "rollout.num_rollout",
    "rollout.rollout_batch_size",
    "rollout.n_samples_per_prompt",
    "rollout.rollout_max_response_len",
    "rollout.rollout_temperature",
    "training.lr",
    "fleet.gpu",
)
"""Options with a field of their own in the form of a run."""


def _form_of_options(names: Sequence[str]) -> type[Form]:
    """Return the form of some options of a run. The key of a field is the option's dotted name."""
    fields: dict[str, Any] = {}
    for name in names:
        section, option = name.split(".")
        schema = section_of(RunConfig.model_fields[section])
        assert schema is not None
        annotation, field = _field(option, schema.model_fields[option], defaults=False)
        named = Field(None, alias=name, title=name, description=field.description)
        fields[name.replace(".", "_")] = (annotation, named)
    return create_model("Options", __base__=Form, **fields)


def set_lines(text: str) -> list[str]:
    """Return the overrides of a box: one `section.option=value` a line, without empty lines and comments."""
    lines = (line.strip().removeprefix("--set").strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


if TYPE_CHECKING:
    Options = Form
    RewardOptions = Form
else:
    Options = _form_of_options(CHANGED_OFTEN)
    """Options of a run that people change."""
    RewardOptions = form_of(RewardConfig)
    """All options of a run's grader."""

EMPTY = Options()
"""Form of a run with nothing filled in."""

SAME_GRADER = RewardOptions()
"""Form of a grader with nothing filled in."""


def recipes(folder: Path) -> dict[str, Path]:
    """Return recipes by name; files without the sections of a recipe are skipped."""
    return {name: path for name, path in recipe_files(folder).items() if _is_recipe(path)}


def _is_recipe(path: Path) -> bool:
    try:
        return {"model", "data", "rollout"} <= set(read(path))
    except ConfigError:
        return False


@cache
def _choices() -> tuple[str, ...]:
    return tuple(recipes(Path.cwd()))


class _RecipeChoices:
    """Type annotation that offers the existing recipes in the JSON schema, and accepts any text, since a file may be
    added later."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(core) | ({"enum": list(_choices())} if _choices() else {})


Recipe = Annotated[str, _RecipeChoices]
"""Name of a recipe."""

RunName = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$", max_length=LONGEST_NAME)]
"""Name of a run."""

RunNameOrNone = Annotated[str, Field(pattern=f"^({NAME_PATTERN})?$", max_length=LONGEST_NAME)]
"""Name of a run, or an empty string."""


# Forms of an evaluation in Prefect's UI.


if TYPE_CHECKING:
    Sampling = Form
    Engine = Form
else:
    Sampling = form_of(BenchmarkSampling, defaults=False)
    """Sampling options of a benchmark."""
    Engine = form_of(EngineOptions)
    """Engine options of an evaluation."""

UNCHANGED_SAMPLING = Sampling()
UNCHANGED_ENGINE = Engine()
"""Forms of an evaluation (with the constant above) with nothing filled in."""
