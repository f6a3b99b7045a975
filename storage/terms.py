"""Under which terms a run's commits were made: its configuration, what it reads from outside, and what its steps read.

```
runs/<run>/run.json                  the terms of the version of the code that created the run
runs/<run>/upgrades/000001.json      those of the first other version that committed anything; then 000002.json, …
```
A commit names the number of its terms, 0 for those of the manifest, and is checked against them for ever: what a later
version lets a step read besides, or an option that it adds, leaves older commits as they are. A terms' configuration
is the one that the run was created with, in the options of the version that wrote it: an option that a run was created
without has its default.
"""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, Field, JsonValue

from cairn.configs.recorded import in_todays_words
from cairn.configs.schema.base import RECORDED, UNCHECKED
from cairn.storage.records import FORMAT, Record, readable
from cairn.storage.version import CodeVersion


class Rules(Record):
    """What a step reads, so what its commits' digests cover."""

    reads: tuple[str, ...]
    """Options, dotted; a section stands for all its options."""
    externals: tuple[str, ...] = ()
    """Inputs from outside the ledger, by their names in `Terms.inputs`."""
    plugins: tuple[str, ...] = ()
    """Options that name user code."""
    engines: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Options that each engine it calls is made from, by the engine's name."""


class Terms(Record):
    """What a version of the code commits to a run under."""

    schema_version: int = FORMAT
    run: str
    config: dict[str, JsonValue]
    inputs: dict[str, str]
    """Digest of everything read from outside the ledger, such as `data` and `model`. What a name's digest is taken of
    never changes: a version that looks further adds a name, such as `reward.custom_rm_path:modules`."""
    rules: dict[str, Rules] | None = None
    """By step; None where the format had none (`cairn.tasks.rules`)."""
    code_version: CodeVersion

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a sealed file. Raises ValueError with what is wrong."""
        return cls.model_validate(readable(data))

    def same_as(self, other: "Terms") -> bool:
        """Whether they are those of one version of the code, so that commits need not tell the two apart."""
        names = ("config", "inputs", "rules", "code_version")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def plugin_digest(self, option: str) -> str:
        """Source digest of the user code that an option names; empty where it names a built-in."""
        return self.inputs.get(f"{option}:modules", self.inputs.get(option, ""))


class Upgrade(Terms):
    """Terms of a version of the code that went on with a run of another one."""

    number: int
    epoch: int
    """The driver's lease."""
    recorded_at: float
    """Unix seconds."""


def plain(config: BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as JSON values."""
    return config.model_dump(mode="json") if isinstance(config, BaseModel) else dict(config)


def as_read_now(recorded: Mapping[str, Any], config: BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    """A recorded configuration in the options of the version that `config` is of."""
    if not isinstance(config, BaseModel):
        return dict(recorded)
    return type(config).model_validate(in_todays_words(recorded), context=RECORDED | UNCHECKED).model_dump(mode="json")


def input_differences(recorded: Mapping[str, str], given: Mapping[str, str]) -> list[tuple[str, Any, Any]]:
    """(name, recorded, given) of inputs that are no longer what was recorded. Names that were not recorded are of a
    version that looks at more."""
    return [
        (f"digest of {name}", value, given.get(name)) for name, value in recorded.items() if given.get(name) != value
    ]


def differences(recorded: Any, given: Any, field: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted fields in which two JSON values differ, with both values; None where one has no such field."""
    if isinstance(recorded, dict) and isinstance(given, dict):
        names = sorted({*recorded, *given})
        prefix = f"{field}." if field and not field.endswith(" ") else field
        return [
            found for name in names for found in differences(recorded.get(name), given.get(name), f"{prefix}{name}")
        ]
    return [] if recorded == given else [(field, recorded, given)]
