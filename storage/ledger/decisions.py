"""Decisions of people about a run: sealed records in one order, stored next to the commits of its steps.

```
runs/<run>/decisions/000001.json    created exclusively; sealed with its digest; names the digest of the one before
runs/<run>/decisions/000002.json
```

| kind | meaning | reader |
|---|---|---|
| `gate` | the run waits before an iteration, from that time on and for that reason | the driver, before the iteration |
| `verdict` | the gate before an iteration is approved or rejected; the newest counts | the same |
| `pin` | an iteration's files are protected, or released again; the newest counts | `upkeep/retention.py` |
| `quarantine` | a prompt is excluded from the draw, or allowed again; the newest counts | the driver |
| `redaction` | tables lose the text of a prompt; names both digests of each | every reader of these tables |
| `in_force` | the prompts excluded from an iteration on; the driver records it before it draws | the `rollout` step |

A decision is made from all decisions before it and gets the next number. When two people decide at once, one is first,
and the other decides again with the first decision in view. So every reader sees the same history. No recorded decision
can be removed, because the next one names its digest.
"""

import getpass
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step, parse_commit_name
from cairn.storage.ledger.manifest import Manifest, read_manifest
from cairn.storage.records import Record
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged, naming_damaged
from cairn.storage.store.store import REQUESTS, Store


class Gate(Record):
    """A request that the run waits before an iteration until somebody approves or rejects it."""

    kind: Literal["gate"] = "gate"
    iteration: int = Field(ge=0)
    cause: Literal["before", "every", "eval_drop", "asked"]
    """Option of `approval` that requests the gate; `asked` if a person or another program requested it."""


class Verdict(Record):
    """Decision whether the run may continue at the gate before an iteration."""

    kind: Literal["verdict"] = "verdict"
    iteration: int = Field(ge=0)
    approved: bool


class Pin(Record):
    """Decision whether an iteration's weights and samples stay recoverable, regardless of the retention policy."""

    kind: Literal["pin"] = "pin"
    iteration: int = Field(ge=0)
    kept: bool


class Quarantine(Record):
    """Decision whether a prompt is excluded from the draw. It takes effect when the driver puts it in force."""

    kind: Literal["quarantine"] = "quarantine"
    prompt: int = Field(ge=0)
    """Row of the data set, from 0."""
    passed_over: bool


class InForce(Record):
    """All prompts that are excluded from an iteration on.

    The driver records this before it draws the iteration's prompts, so that a repeated draw gives the same prompts.
    """

    kind: Literal["in_force"] = "in_force"
    iteration: int = Field(ge=0)
    prompts: tuple[int, ...]
    """Rows of the data set, sorted."""


class RedactedFile(Record):
    """A committed table before and after its redaction."""

    commit: str
    """Name of the commit that holds the file: `000042/rollout.00-000`."""
    path: str
    """Path relative to the run's folder."""
    old_bytes: int = Field(ge=0)
    old_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    new_bytes: int = Field(ge=0)
    new_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @property
    def iteration(self) -> int:
        """Iteration of the commit."""
        return parse_commit_name(self.commit)[0]

    @property
    def step(self) -> Step:
        """Step of the commit."""
        return parse_commit_name(self.commit)[1]


class Redaction(Record):
    """Decision to remove the text and the tokens of a prompt's samples from the run's tables. The rows stay."""

    kind: Literal["redaction"] = "redaction"
    prompt: int = Field(ge=0)
    """Row of the data set, from 0."""
    samples: int = Field(ge=0)
    files: tuple[RedactedFile, ...]
    trained_in: tuple[int, ...]
    """Iterations whose updates consumed samples of the prompt."""
    weight_versions: tuple[int, ...]
    """Weight versions that these updates made. Every later version descends from them."""


AnyKind = Gate | Verdict | Pin | Quarantine | InForce | Redaction
What = Annotated[AnyKind, Field(discriminator="kind")]


FORMAT = 1


class Decision(Record):
    """A decision and its author."""

    schema_version: int = FORMAT
    run: str
    identity: str
    """Identity of the run's manifest. A new run with the name of a deleted run has none of its decisions."""
    number: int = Field(ge=1)
    previous: str | None
    """Digest of the decision before; None for the first."""
    what: What
    by: str
    """Author: `user@host`, or the name that the caller passed."""
    at: float
    """Unix seconds."""
    why: str | None = None

    @property
    def digest(self) -> str:
        """Digest of the canonical JSON of all fields."""
        return canonical.digest(self.model_dump(mode="json"))


class GateState(StrEnum):
    """State of a gate."""

    OPEN = "open"
    """There is no verdict yet."""
    APPROVED = "approved"
    REJECTED = "rejected"


class GateStatus(Record):
    """A gate with its newest verdict."""

    iteration: int
    state: GateState
    gate: Decision | None
    """The gate; None if the verdict was recorded before the run reached the gate."""
    verdict: Decision | None


Decide = Callable[[tuple[Decision, ...]], AnyKind]
"""Function that makes a decision from all decisions so far. If it raises, the error propagates and nothing is
recorded."""


class Decisions:
    """The decisions about one run. Safe to use from several threads: recorded decisions never change."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self._run, self._identity = manifest.run, manifest.identity
        self._known: tuple[Decision, ...] | None = None
        self._keeping = threading.Lock()

    def all(self) -> tuple[Decision, ...]:
        """Return every decision in order.

        The first call makes one request for each decision and two more; later calls make one request and one for each
        new decision. Raises Damaged.
        """
        known = self._known
        if known is None:
            numbers = layout.numbers(self._store.list(layout.decisions(self._run)))
            with ThreadPoolExecutor(REQUESTS) as readers:
                known = tuple(readers.map(self._require, range(1, max(numbers, default=0) + 1)))
        while (newer := self._read(len(known) + 1)) is not None:  # a listing may lag behind
            known = (*known, newer)
        for before, after in zip((None, *known), known, strict=False):
            if after.previous != (before.digest if before else None):
                path = layout.decision(self._run, after.number)
                raise Damaged(f"{path} does not follow the decision before it: one of the two was altered")
        self._keep(known)
        return known

    def _keep(self, known: tuple[Decision, ...]) -> None:
        with self._keeping:  # another thread may have read or recorded more meanwhile
            if self._known is None or len(known) > len(self._known):
                self._known = known

    @property
    def known(self) -> tuple[Decision, ...]:
        """Every decision of the last call of `all`, and those that were recorded here since. Makes no request but the
        first."""
        return self.all() if self._known is None else self._known

    def record(
        self,
        decide: Decide,
        *,
        by: str | None = None,
        why: str | None = None,
        guard: Callable[[], None] = lambda: None,
    ) -> Decision:
        """Record a decision and return it.

        Args:
            decide: makes the decision from all decisions so far.
            by: author; the process's user by default.
            guard: called right before each try; what it raises ends the recording.
        """
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
                self._keep((*so_far, decision))
                return decision

    def gates(self) -> dict[int, GateStatus]:
        """Return every gate of the run, by the iteration before which it waits."""
        return gates(self.all())

    def _require(self, number: int) -> Decision:
        decision = self._read(number)
        if decision is None:
            raise Damaged(f"{layout.decision(self._run, number)} is missing, though there are later decisions")
        return decision

    def _read(self, number: int) -> Decision | None:
        path = layout.decision(self._run, number)
        try:
            data = self._store.read(path)
        except FileNotFoundError:
            return None
        decision = read_decision(data, path)
        if (decision.run, decision.identity, decision.number) != (self._run, self._identity, number):
            raise Damaged(f"{path} is in the wrong place: it is number {decision.number} of run {decision.run!r}")
        return decision


def read_decision(data: bytes, path: str) -> Decision:
    """Parse a decision. Raises Damaged, naming `path`, unless `data` are the bytes that were recorded."""
    with naming_damaged(f"decision {path}"):
        fields = canonical.unseal(data)
        if fields.get("schema_version") != FORMAT:
            raise ValueError(f"it has format {fields.get('schema_version')}, this Cairn reads format {FORMAT}")
        return Decision.model_validate(fields)


def gates(decisions: tuple[Decision, ...]) -> dict[int, GateStatus]:
    """Return every gate, by the iteration before which it waits."""
    gates: dict[int, GateStatus] = {}
    for decision in decisions:
        match decision.what:
            case Gate(iteration=iteration):
                gates[iteration] = GateStatus(iteration=iteration, state=GateState.OPEN, gate=decision, verdict=None)
            case Verdict(iteration=iteration, approved=approved):
                before = gates.get(iteration)
                gates[iteration] = GateStatus(
                    iteration=iteration,
                    state=GateState.APPROVED if approved else GateState.REJECTED,
                    gate=before.gate if before else None,
                    verdict=decision,
                )
    return gates


def pinned(decisions: tuple[Decision, ...]) -> dict[int, Decision]:
    """Return the pinned iterations, each with its decision."""
    newest = {one.what.iteration: one for one in decisions if isinstance(one.what, Pin)}
    return {i: one for i, one in sorted(newest.items()) if isinstance(one.what, Pin) and one.what.kept}


def redacted_files(decisions: Iterable[Decision]) -> dict[str, tuple[tuple[Decision, RedactedFile], ...]]:
    """Return the redacted versions of each file in their order, by the file's path in the run.

    The last version is the one that the file must have now.
    """
    versions: dict[str, tuple[tuple[Decision, RedactedFile], ...]] = {}
    for decision in decisions:
        if isinstance(decision.what, Redaction):
            for file in decision.what.files:
                versions[file.path] = (*versions.get(file.path, ()), (decision, file))
    return versions


def this_user() -> str:
    """Return `user@host` of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
