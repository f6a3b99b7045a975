"""A recipe in the making: options, and comments on where they come from and on what was left out."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from cairn.configs.counterparts import TRAINERS, Counterpart, Table, counterparts
from cairn.configs.errors import ConfigError
from cairn.configs.loader import section_of, without_idle
from cairn.configs.schema.base import has_credentials
from cairn.configs.schema.run import RunConfig
from cairn.configs.yaml_file import parse_yaml

_SECRET = re.compile(r"(api|wandb)[-_]key|password|secret|(hf|hub)[-_]token")


class Draft:
    """Options of a recipe, by their dotted names, with comments."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._comments: dict[str, str] = {}
        self._sources: dict[str, str] = {}
        self._left_out: dict[str, str] = {}
        self.notes: list[str] = []
        """Sentences for the head of the recipe."""
        self.problems: list[str] = []
        """Reasons why the recipe cannot be used as it is."""

    def set(self, option: str, value: Any, comment: str = "") -> None:
        """Set an option. `comment`: where its value comes from, if that is not plain."""
        self.values[option] = value
        if comment:
            self._comments[option] = plain(comment)

    def leave_out(self, flag: str, why: str) -> None:
        """Record that a flag has no effect here."""
        self._left_out[flag] = plain(why)

    def take(self, row: Counterpart, words: Sequence[Any]) -> None:
        """Set the option that a table names for a flag with these values, or record why there is none."""
        flag = written(row.flag, words)
        if not row.options:
            self.leave_out(flag, row.why or row.how)
            return
        if row.value is not None and words and _parsed(str(words[0])) is False:
            return  # a switch that is off
        option = row.options[0]
        if row.value is not None:
            value = row.value
        elif len(words) == 1 and str(words[0]) in row.values:
            value = row.values[str(words[0])]
        else:
            value = typed(option, words)
        if not _fits(option, value):
            self.leave_out(flag, f"{option} is this{f': {row.how}' if row.how else ', with other values'}")
            return
        same = row.attribute.rpartition(".")[2] == option.rpartition(".")[2]
        self.set(option, value, "" if same else flag)
        self._sources[option] = flag

    def take_options(
        self,
        options: Mapping[str, Any],
        given: Collection[str],
        table: Table,
        near: Callable[[str], str] = lambda name: "no counterpart is known here",
    ) -> None:
        """Set every option with a counterpart, and leave out the others.

        Args:
            given: names of those that are not the trainer's defaults.
            near: returns why one that the table lacks is left out.
        """
        rows = counterparts(table)
        for name, value in options.items():
            if (row := rows.get(name)) is None:
                self.leave_out(f"{name}={written('', [value]).strip()}", near(name))
                continue
            self.take(row, value if isinstance(value, list) else [value])
            if name not in given and row.options:
                self._comments[row.options[0]] = f"{TRAINERS[table]}'s default"

    def without_idle(self) -> list[str]:
        """Leave out the options that have no effect, and return the problems of the recipe."""
        try:
            _, idle = without_idle(nested(self.values))
        except ConfigError as error:
            return list(error.problems)
        for one in idle:
            value = self.values.pop(one.option, one.value)
            flag = self._sources.get(one.option, f"{one.option} ({_scalar(value)})")
            self.leave_out(flag, f"no effect while {one.why}")
        return []

    @property
    def left_out(self) -> Mapping[str, str]:
        """What was left out, and why."""
        return dict(self._left_out)

    def text(self, title: str) -> str:
        """Return the recipe as YAML."""
        lines = [f"# {line}" for line in [title, *self.notes]]
        tree = nested(self.values)
        for name in RunConfig.model_fields:
            if name in tree:
                lines += ["", *self._lines(name, tree[name], name, "")]
        if self._left_out:
            lines += ["", "# Without an effect here:"]
            by_reason: dict[str, list[str]] = {}
            for flag, why in self._left_out.items():
                by_reason.setdefault(why, []).append(flag)
            for why, flags in by_reason.items():
                lines.append(f"#   {', '.join(flags)}: {why}")
        return "\n".join(lines) + "\n"

    def _lines(self, name: str, value: Any, option: str, indent: str) -> list[str]:
        comment = f"  # {self._comments[option]}" if option in self._comments else ""
        if isinstance(value, dict) and value and option not in self.values:
            inner = [
                line for key, one in value.items() for line in self._lines(key, one, f"{option}.{key}", indent + "  ")
            ]
            return [f"{indent}{name}:{comment}", *inner]
        if isinstance(value, list) and value and isinstance(value[0], dict):
            dumped = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000).splitlines()
            return [f"{indent}{name}:{comment}", *(f"{indent}  {line}" for line in dumped)]
        return [f"{indent}{name}: {_scalar(value)}{comment}"]


def plain(text: str) -> str:
    """Return a sentence of a table on one line, without Markdown's marks."""
    return " ".join(text.replace("`", "").split())


def written(flag: str, words: Sequence[Any]) -> str:
    """Return a flag with its values as a command line has them. Keys are not shown."""
    if _SECRET.search(flag) or any(has_credentials(str(word)) for word in words):
        return flag
    text = " ".join([flag, *map(str, words)])
    return text if len(text) <= 100 else text[:99] + "…"


def mapping(value: Any) -> dict[str, Any]:
    """Return a value of a YAML file as a mapping with texts as keys; an empty one where it is something else."""
    return {str(key): one for key, one in value.items()} if isinstance(value, dict) else {}


def mapping_in(text: str | None) -> dict[str, Any]:
    """Return the mapping in the text of a YAML file; an empty one where there is none."""
    return mapping(_parsed(text or ""))


def count(value: Any, default: int) -> int:
    """Return a number of things, at least 1; `default` where a script left it open or it is none."""
    number = _parsed(value) if isinstance(value, str) else value
    whole = isinstance(number, int | float) and not isinstance(number, bool) and number == number // 1
    return int(number) if whole and number >= 1 else default


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by dotted names as nested mappings."""
    tree: dict[str, Any] = {}
    for option, value in values.items():
        *path, last = option.split(".")
        owner = tree
        for key in path:
            owner = owner.setdefault(key, {})
        owner[last] = value
    return tree


def typed(option: str, words: Sequence[Any]) -> Any:
    """Return the words of a command line as a value of an option's type; as YAML where they fit none."""
    parsed = [_parsed(word) if isinstance(word, str) else word for word in words]
    candidates: list[Any] = [True] if not words else []
    if len(words) == 1:
        candidates += [parsed[0], words[0]]
    candidates += [parsed, list(words)]
    return next((one for one in candidates if _fits(option, one)), candidates[0])


def _fits(option: str, value: Any) -> bool:
    """Whether an option may have a value; an engine's own options may have every value."""
    field = _field(option)
    if field is None:
        return ".N." not in option
    kind: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    try:
        TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except (ValidationError, ValueError, TypeError):
        return False
    return True


def _parsed(word: str) -> Any:
    try:
        return parse_yaml(word)
    except yaml.YAMLError:
        return word


def _field(option: str) -> FieldInfo | None:
    """Return the field of an option; None inside a mapping of an engine's options."""
    schema: Any = RunConfig
    *path, last = option.split(".")
    for key in path:
        field = schema.model_fields.get(key) if schema is not None else None
        schema = section_of(field) if field is not None else None
    return schema.model_fields.get(last) if schema is not None else None


def _scalar(value: Any) -> str:
    """Return a value in YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=100_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")
