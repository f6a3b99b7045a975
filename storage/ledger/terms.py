"""Terms under which a run's commits are made: configuration, external inputs, and what each step reads.

```
runs/<run>/run.json                  the terms of the version of the code that created the run
runs/<run>/upgrades/000001.json      the terms of the first later version, or of the first other layout of ranks and
                                     engines, that committed anything; then 000002.json, …
```
A commit names the number of its terms (0: those of the manifest) and is always checked against these. So older commits
stay valid when a later version lets a step read more or adds an option. The configuration in terms is the one with
which the run was created, in the options of the version that wrote it. An option that did not exist then has its
default. Only options of the layout may get other values on the way (`cairn.configs.engines.LAYOUT`).
"""

import itertools
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, Field, JsonValue

from cairn.configs.schema.base import RECORDED, UNCHECKED
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import FORMAT, unsealed_fields
from cairn.storage.ledger.leases import Lease
from cairn.storage.records import CodeVersion, Record, code_version
from cairn.storage.store import canonical
from cairn.storage.store.errors import RunDiffers, naming_damaged
from cairn.storage.store.store import Store

if TYPE_CHECKING:
    from cairn.configs.schema.run import RunConfig

# Which code is running.


class Rules(Record):
    """Everything that a step reads, and that the digests of its commits therefore cover."""

    reads: tuple[str, ...]
    """Dotted names of options; a section includes all its options."""
    externals: tuple[str, ...] = ()
    """Inputs from outside the ledger, by their names in `Terms.inputs`."""
    plugins: tuple[str, ...] = ()
    """Options that name user code."""
    engines: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Options that configure each engine that the step calls, by the engine's name."""


class Terms(Record):
    """The terms under which one version of the code commits to a run."""

    schema_version: int = FORMAT
    run: str
    config: dict[str, JsonValue]
    inputs: dict[str, str]
    """Digests of everything read from outside the ledger, such as `data` and `model`. What the digest of a name covers
    never changes. A version that reads more adds a name, such as `reward.custom_rm_path:modules`."""
    rules: dict[str, Rules]
    """Rules by step."""
    code_version: CodeVersion

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a sealed file. Raises ValueError, saying what is wrong."""
        return cls.model_validate(unsealed_fields(data))

    @cached_property
    def read_config(self) -> "RunConfig":
        """The configuration, for reading only (`from_manifest`). Raises ConfigError."""
        # The whole schema takes long to import, and few processes need it.
        from cairn.configs.loader import from_manifest

        return from_manifest(self.config)

    def is_other_code(self, other: "Terms") -> bool:
        """Return whether another version of the code wrote the other terms, or read something else."""
        return any(getattr(self, name) != getattr(other, name) for name in ("inputs", "rules", "code_version"))

    def equals(self, other: "Terms") -> bool:
        """Return whether both are the terms of one version of the code, so that commits need not distinguish them."""
        names = ("config", "inputs", "rules", "code_version")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def plugin_digest(self, option: str) -> str:
        """Return the source digest of the user code that an option names; empty if it names a built-in."""
        return self.inputs.get(f"{option}:modules", self.inputs.get(option, ""))


class Upgrade(Terms):
    """Terms of a version of the code that continued a run of another version, or in another layout."""

    number: int
    epoch: int
    """Epoch of the driver's lease."""
    recorded_at: float
    """Unix seconds."""


def plain(config: BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as JSON values."""
    return config.model_dump(mode="json") if isinstance(config, BaseModel) else dict(config)


def upgrade_config(recorded: Mapping[str, Any], config: BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration in the options of the version of `config`."""
    if not isinstance(config, BaseModel):
        return dict(recorded)
    return type(config).model_validate(recorded, context=RECORDED | UNCHECKED).model_dump(mode="json")


def input_differences(recorded: Mapping[str, str], current: Mapping[str, str]) -> list[tuple[str, Any, Any]]:
    """Return (name, recorded, current) of each input whose digest differs from the recorded one.

    Ignores names that were not recorded: they belong to a version that reads more.
    """
    return [
        (f"digest of {name}", value, current.get(name))
        for name, value in recorded.items()
        if current.get(name) != value
    ]


def differences(recorded: Any, current: Any, field: str = "") -> list[tuple[str, Any, Any]]:
    """Return (dotted field, recorded value, current value) of each field in which two JSON values differ.

    A value is None if its side lacks the field.
    """
    if isinstance(recorded, dict) and isinstance(current, dict):
        prefix = f"{field}." if field and not field.endswith(" ") else field
        return [
            difference
            for name in sorted({*recorded, *current})
            for difference in differences(recorded.get(name), current.get(name), f"{prefix}{name}")
        ]
    return [] if recorded == current else [(field, recorded, current)]


class RunTerms:
    """All terms of one run, by number; number 0 are its manifest's. Safe to use from several threads."""

    def __init__(self, store: Store, manifest: Terms):
        self._store = store
        self._manifest = manifest
        self._now: Terms | None = None
        """Terms of the running code, once it has declared them."""
        self._committing_under: int | None = None
        self._upgrades: tuple[Upgrade, ...] | None = None
        self._lock = threading.Lock()

    @property
    def upgrades(self) -> tuple[Upgrade, ...]:
        """Terms of the versions of the code and the layouts that continued the run after those that created it, as of
        the first access.

        Makes one request for each and one more. Raises Damaged.
        """
        if self._upgrades is None:
            self._upgrades = tuple(self._read(1))
        return self._upgrades

    @property
    def now(self) -> Terms:
        """Terms that this process has declared, or else the newest recorded ones."""
        if self._now is not None:
            return self._now
        return self.upgrades[-1] if self.upgrades else self._manifest

    def reread(self) -> None:
        """Read terms that another process has recorded since. Makes one request more than there are."""
        self._upgrades = (*self.upgrades, *self._read(len(self.upgrades) + 1))

    def numbered(self, number: int) -> Terms | None:
        """Return the terms of a number, or None if they are missing."""
        if number == 0:
            return self._manifest
        if number > len(self.upgrades):
            self.reread()
        return self.upgrades[number - 1] if number <= len(self.upgrades) else None

    def begin(self) -> None:
        """Declare that this process has created the run, so that it commits under the manifest's terms."""
        self._now, self._committing_under, self._upgrades = self._manifest, 0, ()

    def declare(
        self,
        config: BaseModel | Mapping[str, Any],
        inputs: Mapping[str, str] | None,
        rules: Mapping[str, Rules] | None,
        changing: Collection[str] = (),
    ) -> None:
        """Declare the terms under which this process commits. None means the recorded value. Raises RunDiffers.

        `changing`: options that may differ from the recorded ones. The next commit records their new values.
        """
        recorded = self.now
        found = differences(upgrade_config(recorded.config, config), plain(config))
        differing = [difference for difference in found if difference[0] not in changing]
        if inputs is not None:
            differing += input_differences(recorded.inputs, inputs)
        if differing:
            raise RunDiffers(recorded.run, differing)
        self._now = Terms(
            run=recorded.run,
            config=plain(config),
            inputs=dict(recorded.inputs if inputs is None else inputs),
            rules=recorded.rules if rules is None else dict(rules),
            code_version=code_version(),
        )

    def record(self, lease: Lease) -> int:
        """Return the number of the terms under which this process commits. Record them if they are new. Raises
        LeaseLost."""
        with self._lock:
            while self._committing_under is None:
                recorded = [self._manifest, *self.upgrades]
                number = len(recorded)
                if self._now is None or self._now.equals(recorded[-1]):
                    self._committing_under = number - 1
                    continue
                fields = self._now.model_dump(mode="json", include=set(Terms.model_fields))
                upgrade = Upgrade(**fields, number=number, epoch=lease.epoch, recorded_at=time.time())
                data = canonical.seal(upgrade.model_dump(mode="json"))
                if self._store.create(layout.upgrade(self._manifest.run, number), data, lease.check):
                    self._committing_under = number
                self._upgrades = (*self.upgrades, *self._read(number))
            return self._committing_under

    def _read(self, first: int) -> Iterator[Upgrade]:
        run = self._manifest.run
        for number in itertools.count(first):
            path = layout.upgrade(run, number)
            try:
                data = self._store.read(path)
            except FileNotFoundError:
                return
            with naming_damaged(path):
                upgrade = Upgrade.from_bytes(data)
                if (upgrade.run, upgrade.number) != (run, number):
                    raise ValueError(f"it is number {upgrade.number} of run {upgrade.run!r}")
            yield upgrade
