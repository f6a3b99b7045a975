"""Commits: small JSON markers. A step's snapshot exists when its commit exists.

```
runs/<run>/iterations/000042/train.json                          the commit of a step
runs/<run>/iterations/000042/train/000003-5f0c…/steps.parquet    its file, written before it
```

Shards of rollout and reward share files of commits (`cairn.storage.ledger.shards`).

A reader interprets the files like this:

| files | commit | meaning |
|---|---|---|
| none, some or all | absent | the step has not happened; no commit names its files, and they may be collected |
| all, as recorded | present, digest right | the step is done for good |
| missing or altered | present | damage: an error that names the file |
| any | present, digest wrong | damage: an error that names the commit |

A crash leaves:

| moment of the crash | left behind | the next driver |
|---|---|---|
| while files are written | an attempt folder | starts a fresh attempt; a rollout recovers finished groups |
| after the files, before the commit | the same | the same |
| while the commit is created | the whole commit or none | finds it, or starts a fresh attempt |
| after the commit | everything | finds it and continues |

Two drivers at one step write into separate attempts. One of them creates the commit; the other reads that commit and
continues from it. A commit is never rewritten. Its digest covers everything in it, including the digests of its inputs'
commits. So the commits of a run form a Merkle chain from any weights back to the prompts.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from graphlib import TopologicalSorter
from typing import Any, Self

from pydantic import Field, JsonValue, PrivateAttr, ValidationInfo, field_validator

from cairn.storage.ledger import layout
from cairn.storage.records import Environment, Record
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged, naming_damaged
from cairn.storage.store.store import check_path

FORMAT = 3
"""Format version of ledgers. `tests/fixtures/ledgers` holds a ledger of this format."""


class Marker(Record):
    """A record in its own file that carries its own digest. The event that it describes exists as soon as the file
    exists."""

    schema_version: int = FORMAT

    @property
    def digest(self) -> str:
        """Digest of the canonical JSON of all fields."""
        return canonical.digest(self.as_fields())

    def to_bytes(self) -> bytes:
        """Return the content of the marker's file."""
        return canonical.seal(self.as_fields())

    @classmethod
    def unsealed(cls, data: bytes) -> Self:
        """Parse a file. Raises ValueError, saying what is wrong, unless `to_bytes` wrote these bytes."""
        return cls.model_validate(unsealed_fields(data))

    def as_fields(self) -> dict[str, Any]:
        """Return the fields as they are written and digested."""
        # The digest leaves out fields that were not set when the marker was written: older versions had fewer fields.
        return {"schema_version": self.schema_version, **self.model_dump(mode="json", exclude_unset=True)}


def unsealed_fields(data: bytes) -> dict[str, Any]:
    """Return the fields of a sealed file without its digest.

    Raises ValueError unless the bytes are those that were written, in a format that this version reads.
    """
    fields = canonical.unseal(data)
    require_readable(fields)
    return fields


def require_readable(fields: Mapping[str, Any]) -> None:
    """Raise ValueError unless this version reads the file's format."""
    version = fields.get("schema_version")
    if version != FORMAT:
        raise ValueError(f"it has format {version}, this Cairn reads format {FORMAT}; use the version that wrote it")


class Step(StrEnum):
    """A node of the iteration's DAG, in the order in which data flows."""

    ADMIT = "admit"
    """Prompts whose generation starts. Only pipelines that generate continuously have this step."""
    ROLLOUT = "rollout"
    """Samples of a shard's prompts."""
    REWARD = "reward"
    """Grades of a shard's samples."""
    FILTER = "filter"
    """The decision which groups are trained on, buffered for later or dropped."""
    SCORE = "score"
    """Log-probs of the selected samples under the old policy and the reference model."""
    ADVANTAGE = "advantage"
    """Per-token advantages and returns of the selected samples."""
    TRAIN = "train"
    """Optimizer steps, which produce new weight versions."""
    CHECKPOINT = "checkpoint"
    """A restore point of the training state."""
    SYNC = "sync"
    """The weight versions that the rollout engines report."""
    EVAL = "eval"
    """A benchmark's samples and grades under one weight version."""


def parse_commit_name(name: str) -> tuple[int, Step, str | None]:
    """Return iteration, step and shard from a commit's name. Raises ValueError for another name."""
    iteration, _, rest = name.partition("/")
    step, _, shard = rest.partition(".")
    return int(iteration), Step(step), shard or None


class OutputFile(Record):
    """A file of a snapshot."""

    path: str
    """Path relative to the run's folder."""
    bytes: int = Field(ge=0)
    rows: int | None = Field(None, ge=0)
    """Rows of a table; None if the file is not a table."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the file's bytes."""
    content: str | None = None
    """SHA-256 of a table's content without its measured columns (`cairn.storage.ledger.schemas.ALL_MEASURED`), as the
    version of the code that wrote the table encodes it; None if the table has no such column."""

    @field_validator("path")
    @classmethod
    def _stays_in_the_run(cls, path: str) -> str:
        return check_path(path)


class Commit(Marker):
    """Marker of one committed step, as the module describes it. Digests are hexadecimal SHA-256, times Unix seconds."""

    run: str
    terms: int = Field(0, ge=0)
    """Number of the terms under which the commit was made (`cairn.storage.ledger.terms`)."""
    iteration: int = Field(ge=0)
    step: Step
    shard: str | None = None
    attempt: str
    """Name of the folder of the commit's files. It is partly random, so no two drivers write the same commit."""
    epoch: int = Field(ge=0)
    """Epoch of the driver's lease."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Digests of everything that the step read, by name. Commits are named as `000041/train` or
    `000042/rollout.00-000`, other inputs such as `data` as the run's manifest names them."""
    config_digest: str
    """Digest of the configuration fields that the step reads."""
    outputs: tuple[OutputFile, ...] = ()
    weight_version_in: int | None = None
    weight_version_out: int | None = None
    state_digest: str | None = None
    """Digest of the training state after the step."""
    values: dict[str, JsonValue] = Field(default_factory=dict)
    """Small results that later steps read."""
    metrics: dict[str, float] = Field(default_factory=dict)
    timings: dict[str, float] = Field(default_factory=dict)
    """Seconds by activity."""
    started_at: float
    committed_at: float
    environment: Environment
    _record: str | None = PrivateAttr(None)
    """Store path of the record that holds the commit; None for a file of its own."""

    @field_validator("run", "attempt", "shard")
    @classmethod
    def _stays_in_its_folder(cls, name: str | None, field: ValidationInfo) -> str | None:
        return name if name is None else layout.check_name(name, str(field.field_name))

    @property
    def name(self) -> str:
        """Name by which other commits refer to this one: `000042/rollout.00-000`."""
        return layout.commit_name(self.iteration, self.step, self.shard)

    @property
    def path(self) -> str:
        """Store path of the file that holds the commit."""
        return self._record or layout.commit(self.run, self.iteration, self.step, self.shard)

    def within(self, record: str) -> Self:
        """Return the commit as part of the record at a store path."""
        placed = self.model_copy()
        placed._record = record
        return placed

    @property
    def tables(self) -> tuple[OutputFile, ...]:
        """Output files without those stored next to the step's table (`cairn.storage.ledger.layout.SIDE_FILES`)."""
        return tuple(output for output in self.outputs if output.path.rpartition("/")[2] not in layout.SIDE_FILES)

    @property
    def table(self) -> OutputFile:
        """The only table of a commit that has exactly one."""
        (only,) = self.tables
        return only

    @property
    def images(self) -> OutputFile | None:
        """File with the images of a rollout's prompts; None if the prompts have no images."""
        return self.side_file(layout.IMAGES_FILE)

    def side_file(self, name: str) -> OutputFile | None:
        """Return a file stored next to the table, one of `cairn.storage.ledger.layout.SIDE_FILES`, or None if there is
        none."""
        return next((output for output in self.outputs if output.path.endswith(f"/{name}")), None)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> "Commit":
        """Parse a commit. Raises Damaged, naming `path`, unless `data` are the bytes that were committed at `path`."""
        with naming_damaged(f"commit {path}"):
            commit = cls.unsealed(data)
        if layout.commit(commit.run, commit.iteration, commit.step, commit.shard) != path:
            raise Damaged(f"commit {path} is in the wrong place: it names {commit.name} of run {commit.run}")
        return commit


def newest_selection(commits: Sequence[Commit]) -> Commit | None:
    """Return the filter step of the last round of an iteration, or None before there is one.

    `commits` are the iteration's commits, in the ledger's order.
    """
    return next((commit for commit in reversed(commits) if commit.step is Step.FILTER), None)


def causal_order(commits: Iterable[Commit]) -> list[Commit]:
    """Return the commits sorted so that each comes after those it was made from."""
    by_name = {commit.name: commit for commit in commits}
    made_from = {name: [i for i in commit.inputs if i in by_name] for name, commit in by_name.items()}
    return [by_name[name] for name in TopologicalSorter(made_from).static_order()]
