"""What people can decide about a run. See `cairn.storage.decisions`."""

from typing import Annotated, Literal

from pydantic import Field

from cairn.storage.commits import Step
from cairn.storage.records import Record


class Gate(Record):
    """A run waits before an iteration until somebody says whether it may go on."""

    kind: Literal["gate"] = "gate"
    iteration: int = Field(ge=0)
    cause: Literal["before", "every", "eval_drop", "asked"]
    """The option of `approval` that asks for it; `asked`: somebody, or another program, did."""


class Verdict(Record):
    """Whether the run may go on at the gate before an iteration."""

    kind: Literal["verdict"] = "verdict"
    iteration: int = Field(ge=0)
    approved: bool


class Pin(Record):
    """Whether what brings an iteration back, its weights and its samples, is kept whatever retention says."""

    kind: Literal["pin"] = "pin"
    iteration: int = Field(ge=0)
    kept: bool


class Quarantine(Record):
    """Whether a prompt shall be kept from being drawn. It holds from where the driver puts it in force."""

    kind: Literal["quarantine"] = "quarantine"
    prompt: int = Field(ge=0)
    """Row of the data set, from 0."""
    passed_over: bool


class InForce(Record):
    """All prompts that are passed over from an iteration on: recorded by the driver before it draws that iteration's,
    so that whoever draws them again draws the same."""

    kind: Literal["in_force"] = "in_force"
    iteration: int = Field(ge=0)
    prompts: tuple[int, ...]
    """Sorted."""


class RedactedFile(Record):
    """A committed table before and after."""

    commit: str
    """Name of the commit that names it: `000042/rollout.00-000`."""
    path: str
    """Relative to the run's folder."""
    old_bytes: int = Field(ge=0)
    old_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    new_bytes: int = Field(ge=0)
    new_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @property
    def iteration(self) -> int:
        """Of the commit."""
        return int(self.commit.partition("/")[0])

    @property
    def step(self) -> Step:
        """Of the commit."""
        return Step(self.commit.partition("/")[2].partition(".")[0])


class Redaction(Record):
    """The text and the tokens of a prompt's samples are taken out of the run's tables; their rows stay."""

    kind: Literal["redaction"] = "redaction"
    prompt: int = Field(ge=0)
    """Row of the data set, from 0."""
    samples: int = Field(ge=0)
    files: tuple[RedactedFile, ...]
    trained_in: tuple[int, ...]
    """The iterations whose updates consumed its samples."""
    weight_versions: tuple[int, ...]
    """That these updates made; every later one descends from them."""


AnyKind = Gate | Verdict | Pin | Quarantine | InForce | Redaction
What = Annotated[AnyKind, Field(discriminator="kind")]
