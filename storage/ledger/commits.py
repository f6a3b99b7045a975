"""The commit: a small JSON marker that makes a step's snapshot exist.

```
runs/<run>/iterations/000042/rollout.00-000.json                       the commit of shard 00-000
runs/<run>/iterations/000042/rollout/00-000.000003-5f0c…/samples.parquet   its file, written before it
```

What a reader finds, and what it means:

| files | commit | meaning |
|---|---|---|
| none, some or all | absent | the step has not happened; its files are nobody's and may be collected |
| all, as recorded | present, digest right | the step has happened, once and for ever |
| missing or altered | present | damage: an error that names the file |
| any | present, digest wrong | damage: an error that names the commit |

Who writes what, and what a crash in between leaves:

| moment of the crash | left behind | the next driver |
|---|---|---|
| while files are written | an attempt folder | starts a fresh attempt; a rollout takes over its finished groups |
| after the files, before the commit | the same | the same |
| while the commit is created | the commit or none: it appears whole | finds it, or starts a fresh attempt |
| after the commit | all of it | finds it and goes on |

Two drivers at one step write into attempts of their own, and one of them creates the commit; the other reads it and
goes on from there. A commit is never rewritten. Its digest covers everything in it, the digests of its inputs' commits
included: the commits of a run form a Merkle chain from any weights back to the prompts.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from graphlib import TopologicalSorter
from typing import Any, Self

from pydantic import Field, JsonValue, ValidationInfo, field_validator

from cairn.storage.ledger import layout
from cairn.storage.records import Environment, Record
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import check_path

# Values of the ledger, and the format that they are written in.


FORMAT = 3
"""The format of ledgers: `tests/fixtures/ledgers` holds one."""


class Marker(Record):
    """A record in a file of its own, which carries the digest of all of it: what it tells of exists with the file."""

    schema_version: int = FORMAT

    @property
    def digest(self) -> str:
        """Of the canonical JSON of all fields."""
        return canonical.digest(self._fields())

    def to_bytes(self) -> bytes:
        """The file."""
        return canonical.seal(self._fields())

    @classmethod
    def unsealed(cls, data: bytes) -> Self:
        """Read a file. Raises ValueError, with what is wrong, unless its bytes are those that `to_bytes` gave."""
        return cls.model_validate(readable(data))

    def _fields(self) -> dict[str, Any]:
        # What a marker was written without stays out of its digest: older versions knew fewer fields.
        return {"schema_version": self.schema_version, **self.model_dump(mode="json", exclude_unset=True)}


def readable(data: bytes) -> dict[str, Any]:
    """The fields of a sealed file, without its digest. Raises ValueError unless its bytes are those that were written,
    in a format that this version reads."""
    fields = canonical.unseal(data)
    require_readable(fields)
    del fields["digest"]
    return fields


def require_readable(fields: Mapping[str, Any]) -> None:
    """Raise ValueError unless a file's format is one that this version reads."""
    found = fields.get("schema_version")
    if found != FORMAT:
        raise ValueError(f"it has format {found}, this Cairn reads format {FORMAT}; use the version that wrote it")


class Step(StrEnum):
    """A node of the iteration's DAG, in the order in which data flows."""

    ADMIT = "admit"
    """Prompts of which samples are begun, where they are generated all the time."""
    ROLLOUT = "rollout"
    """Samples of a shard's prompts."""
    REWARD = "reward"
    """Grades of a shard's samples."""
    FILTER = "filter"
    """Which groups are trained on, kept for later or dropped."""
    SCORE = "score"
    """Log-probs of the kept samples under the old policy and the reference model."""
    ADVANTAGE = "advantage"
    """Per-token advantages and returns of the kept samples."""
    TRAIN = "train"
    """Optimizer steps; makes new weight versions."""
    CHECKPOINT = "checkpoint"
    """A restore point of the training state."""
    SYNC = "sync"
    """The weight versions that the rollout engines report."""
    EVAL = "eval"
    """A benchmark's samples and grades under one weight version."""


class OutputFile(Record):
    """A file of a snapshot."""

    path: str
    """Relative to the run's folder."""
    bytes: int = Field(ge=0)
    rows: int | None = Field(None, ge=0)
    """Rows of a table; None where the file is no table."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the file's bytes."""
    content: str | None = None
    """SHA-256 of a table without the columns that say how it came about (`cairn.storage.ledger.schemas.NOT_MADE`); None
    where it has none of these."""

    @field_validator("path")
    @classmethod
    def _stays_in_the_run(cls, path: str) -> str:
        return check_path(path)


class Commit(Marker):
    """See the module. Digests are hexadecimal SHA-256, times Unix seconds."""

    run: str
    terms: int = Field(0, ge=0)
    """Number of the terms that it was made under, see `cairn.storage.ledger.terms`."""
    iteration: int = Field(ge=0)
    step: Step
    shard: str | None = None
    attempt: str
    """The folder of its files; random in part, so no two drivers write the same commit."""
    epoch: int = Field(ge=0)
    """The driver's lease."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Digest of everything read, by name: commits as `000041/train` or `000042/rollout.00-000`, others such as
    `data` as the run's manifest names them."""
    config_digest: str
    """Of the configuration fields that the step reads."""
    outputs: tuple[OutputFile, ...] = ()
    weight_version_in: int | None = None
    weight_version_out: int | None = None
    state_digest: str | None = None
    """Of the training state that the step left."""
    values: dict[str, JsonValue] = Field(default_factory=dict)
    """Small results that later steps read."""
    metrics: dict[str, float] = Field(default_factory=dict)
    timings: dict[str, float] = Field(default_factory=dict)
    """Seconds, by what they went into."""
    started_at: float
    committed_at: float
    environment: Environment

    @field_validator("run", "attempt", "shard")
    @classmethod
    def _stays_in_its_folder(cls, name: str | None, field: ValidationInfo) -> str | None:
        return name if name is None else layout.check_name(name, str(field.field_name))

    @property
    def name(self) -> str:
        """How other commits name this one: `000042/rollout.00-000`."""
        return layout.commit_name(self.iteration, self.step, self.shard)

    @property
    def tables(self) -> tuple[OutputFile, ...]:
        """Its files but those beside its table (`cairn.storage.ledger.layout.BESIDE`)."""
        return tuple(output for output in self.outputs if output.path.rpartition("/")[2] not in layout.BESIDE)

    @property
    def table(self) -> OutputFile:
        """That of a commit that has exactly one."""
        (only,) = self.tables
        return only

    @property
    def images(self) -> OutputFile | None:
        """The file of the images of a rollout's prompts; None where they have none."""
        return self.beside(layout.IMAGES_FILE)

    def beside(self, name: str) -> OutputFile | None:
        """A file beside its table, one of `cairn.storage.ledger.layout.BESIDE`; None where it has none."""
        return next((output for output in self.outputs if output.path.endswith(f"/{name}")), None)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> "Commit":
        """Read a marker. Raises Damaged, naming `path`, unless its bytes are those that were committed there."""
        try:
            commit = cls.unsealed(data)
        except ValueError as error:
            raise Damaged(f"commit {path} cannot be trusted: {error}") from None
        if layout.commit(commit.run, commit.iteration, commit.step, commit.shard) != path:
            raise Damaged(f"commit {path} belongs to another place: it says {commit.name} of run {commit.run}")
        return commit


def newest_selection(commits: Sequence[Commit]) -> Commit | None:
    """Of an iteration's commits, in the ledger's order, the filter step of the last round; None before there is one."""
    return next((commit for commit in reversed(commits) if commit.step is Step.FILTER), None)


def causal_order(commits: Iterable[Commit]) -> list[Commit]:
    """Each commit after those it was made from."""
    by_name = {commit.name: commit for commit in commits}
    made_from = {name: [i for i in commit.inputs if i in by_name] for name, commit in by_name.items()}
    return [by_name[name] for name in TopologicalSorter(made_from).static_order()]
