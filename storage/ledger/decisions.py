"""What people decide about a run: commits beside those of its steps, in one order.

```
runs/<run>/decisions/000001.json    created exclusively, sealed with its digest, naming the digest of the one before
runs/<run>/decisions/000002.json
```

| kind | says | who reads it |
|---|---|---|
| `gate` | the run waits before an iteration, since then and for that reason | its driver, before the iteration |
| `verdict` | the gate before an iteration is approved or rejected; the newest counts | the same |
| `pin` | an iteration's files are kept, or no longer on this account; the newest counts | `upkeep/retention.py` |
| `quarantine` | a prompt shall not be drawn any more, or again; the newest counts | the driver |
| `redaction` | tables are rewritten without a prompt's text, both digests of each | whoever reads them |
| `in_force` | from an iteration on these prompts are passed over: the driver's, before it draws | the `rollout` step |

Whoever records a decision makes it from all that were there, and its number is the next: of two people at once one is
first, and the other decides again with that in view. So every reader finds the same history, and none that was recorded
can be taken out: the one after it names its digest.
"""

import getpass
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.manifest import Manifest, read_manifest
from cairn.storage.records import Record
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store

# What people can decide about a run. See `cairn.storage.ledger.decisions`.


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


FORMAT = 1
_REQUESTS = 8


class Decision(Record):
    """One decision, and who took it."""

    schema_version: int = FORMAT
    run: str
    identity: str
    """Of the run's manifest: a run that is made under the name of a deleted one has none of its decisions."""
    number: int = Field(ge=1)
    previous: str | None
    """Digest of the decision before; None in the first."""
    what: What
    by: str
    """`user@host`, or the name that was given."""
    at: float
    """Unix seconds."""
    why: str | None = None

    @property
    def digest(self) -> str:
        """Of the canonical JSON of all fields."""
        return canonical.digest(self.model_dump(mode="json"))


class GateState(StrEnum):
    """Where a gate stands."""

    OPEN = "open"
    """Nobody has decided."""
    APPROVED = "approved"
    REJECTED = "rejected"


class GateStanding(Record):
    """A gate with its newest verdict."""

    iteration: int
    state: GateState
    gate: Decision | None
    """None where the verdict came before the run did."""
    verdict: Decision | None


Decide = Callable[[tuple[Decision, ...]], AnyKind]
"""Makes a decision from all that were taken so far; what it raises is raised, and nothing is recorded."""


class Decisions:
    """The decisions about one run. Safe to use from several threads: what is there is never changed."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self._run, self._identity = manifest.run, manifest.identity
        self._known: tuple[Decision, ...] | None = None

    def all(self) -> tuple[Decision, ...]:
        """Every decision, in their order. The first time a request for each decision and two, then one and those that
        are new. Raises Damaged."""
        known = self._known
        if known is None:
            names = self._store.list(layout.decisions(self._run))
            numbers = [number for name in names if (number := layout.parse_decision(name)) is not None]
            with ThreadPoolExecutor(_REQUESTS) as readers:
                known = tuple(readers.map(self._require, range(1, max(numbers, default=0) + 1)))
        while (newer := self._read(len(known) + 1)) is not None:  # a listing may lag behind
            known = (*known, newer)
        for before, after in zip((None, *known), known, strict=False):
            if after.previous != (before.digest if before else None):
                path = layout.decision(self._run, after.number)
                raise Damaged(f"{path} does not follow the decision before it: one of the two is not what was recorded")
        self._known = known
        return known

    def record(
        self,
        decide: Decide,
        *,
        by: str | None = None,
        why: str | None = None,
        guard: Callable[[], None] = lambda: None,
    ) -> Decision:
        """Take a decision. `by`: the process's user by default. `guard` is called right before each try; what it raises
        ends the recording."""
        while True:
            so_far = self.all()
            decision = Decision(
                run=self._run,
                identity=self._identity,
                number=len(so_far) + 1,
                previous=so_far[-1].digest if so_far else None,
                what=decide(so_far),
                by=by or this_user(),
                at=time.time(),
                why=why,
            )
            path = layout.decision(self._run, decision.number)
            read_manifest(self._store, self._run)  # raises where the run is being deleted
            if self._store.create(path, canonical.seal(decision.model_dump(mode="json")), guard):
                return decision

    def gates(self) -> dict[int, GateStanding]:
        """Every gate of the run, by the iteration that it stands before."""
        return gates(self.all())

    def _require(self, number: int) -> Decision:
        found = self._read(number)
        if found is None:
            raise Damaged(f"{layout.decision(self._run, number)} is missing, though there are later decisions")
        return found

    def _read(self, number: int) -> Decision | None:
        path = layout.decision(self._run, number)
        try:
            data = self._store.read(path)
        except FileNotFoundError:
            return None
        decision = read_decision(data, path)
        if (decision.run, decision.identity, decision.number) != (self._run, self._identity, number):
            raise Damaged(f"{path} belongs to another place: it is number {decision.number} of a run {decision.run!r}")
        return decision


def read_decision(data: bytes, path: str) -> Decision:
    """A decision from its file. Raises Damaged, naming `path`, unless its bytes are those that were recorded."""
    try:
        fields = canonical.unseal(data)
        if fields.get("schema_version") != FORMAT:
            raise ValueError(f"it has format {fields.get('schema_version')}, this Cairn reads format {FORMAT}")
        del fields["digest"]
        return Decision.model_validate(fields)
    except (ValueError, ValidationError) as error:
        raise Damaged(f"decision {path} cannot be trusted: {error}") from None


def gates(decisions: tuple[Decision, ...]) -> dict[int, GateStanding]:
    """See `Decisions.gates`."""
    found: dict[int, GateStanding] = {}
    for decision in decisions:
        match decision.what:
            case Gate(iteration=iteration):
                found[iteration] = GateStanding(iteration=iteration, state=GateState.OPEN, gate=decision, verdict=None)
            case Verdict(iteration=iteration, approved=approved):
                before = found.get(iteration)
                found[iteration] = GateStanding(
                    iteration=iteration,
                    state=GateState.APPROVED if approved else GateState.REJECTED,
                    gate=before.gate if before else None,
                    verdict=decision,
                )
    return found


def pinned(decisions: tuple[Decision, ...]) -> dict[int, Decision]:
    """The iterations that are pinned, each with the decision."""
    newest = {one.what.iteration: one for one in decisions if isinstance(one.what, Pin)}
    return {i: one for i, one in sorted(newest.items()) if isinstance(one.what, Pin) and one.what.kept}


def redacted_files(decisions: Iterable[Decision]) -> dict[str, tuple[tuple[Decision, RedactedFile], ...]]:
    """What redactions made of each file of the run, by its path there, in their order: the last is what it shall be."""
    found: dict[str, tuple[tuple[Decision, RedactedFile], ...]] = {}
    for decision in decisions:
        if isinstance(decision.what, Redaction):
            for file in decision.what.files:
                found[file.path] = (*found.get(file.path, ()), (decision, file))
    return found


def this_user() -> str:
    """`user@host` of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user that nobody has named
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
