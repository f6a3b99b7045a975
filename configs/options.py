"""The schema as a flat list of options with dotted names, for error messages and documentation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

LIST_ITEM = "N"
"""Stands for a position in a dotted name: `eval.benchmarks.N.path`."""


@dataclass(frozen=True)
class Option:
    """One leaf of the schema."""

    name: str
    """Dotted, from the root: `rollout.rollout_batch_size`."""
    values: str
    """What it takes, in words."""
    default: Any
    """PydanticUndefined where a value is required."""
    description: str
    section: type[BaseModel]
    """The schema that declares it."""

    @property
    def required(self) -> bool:
        return self.default is PydanticUndefined


def options(schema: type[BaseModel], prefix: str = "") -> Iterator[Option]:
    """Every option of `schema`, in the order in which it is written there."""
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
    """The section that a field holds, or None."""
    return _model(field.annotation)


def item_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that stands in every place of a field's list, or that may stand in the field, or None."""
    return next((model for arg in get_args(field.annotation) if (model := _model(arg)) is not None), None)


def _model(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _values(field: FieldInfo) -> str:
    """`int ≥ 1`, `"a" or "b"`, `list of int`, `text or null`."""
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
