"""Results of evaluations, stored outside the runs so that every run and process can share them.

```
evals/<weights>-<tokenizer>/<benchmark>-<settings>/result.json             the result, created exclusively
evals/<weights>-<tokenizer>/<benchmark>-<settings>/claims/000001.json      lease of the process that computes it
evals/<weights>-<tokenizer>/<benchmark>-<settings>/000001-5f0c…/samples.parquet             its rows
evals/<weights>-<tokenizer>/<benchmark>-<settings>/000001-5f0c…/write_ahead/000000.….arrow  finished samples before it
```
The path of a result names everything that it depends on: the digests of the weights, of the tokenizer and of the
settings (sampler, engine, number format, prompt, grader, rows). A process looks the path up before it computes
anything, and equal requests lead to the same file.

| found | the process |
|---|---|
| a result | returns it and computes nothing |
| no result, and a claim whose holder is alive | waits for the result |
| no result, and no claim, or a claim whose holder is gone | claims it, recovers finished samples, computes the rest |
"""

import hashlib
import math
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping

import pyarrow as pa
from pydantic import Field, JsonValue, field_validator

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import FORMAT, Marker, OutputFile
from cairn.storage.ledger.leases import Lease, LeaseState, LeaseSubject, Outcome, newest_lease
from cairn.storage.ledger.snapshots import AttemptFolder, check_bytes, discard_superseded, from_parquet
from cairn.storage.records import Environment, Record
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged, LeaseHeld, LinkOutsideStore, naming_damaged
from cairn.storage.store.store import Store

LOOK_INTERVAL = 0.5
"""Seconds between two checks for a result that another process computes."""


class EvaluationKey(Record):
    """Everything that a result depends on."""

    weights: str = Field(pattern=r"^[0-9a-f]{64}$")
    """`weights_checksum` (`cairn.engines.weights.fingerprint`) of the weights, in the number format in which they are
    served. It covers the tensors by their Hugging Face names, tied tensors once. So a run's publication and a folder
    with the same weights have equal checksums."""
    tokenizer: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Digest of the conversion from text to tokens and back, independent of the file format of the tokenizer."""
    benchmark: str
    """Name of the benchmark."""
    settings: dict[str, JsonValue]
    """All other settings by name: numbers, strings, digests."""

    @property
    def folder(self) -> str:
        """Store path of the folder of the result."""
        return layout.evaluation(self.weights, self.tokenizer, self.benchmark, canonical.digest(self.settings))

    @property
    def digest(self) -> str:
        """Digest of the whole key."""
        return canonical.digest(self.model_dump(mode="json"))


class Evaluation(Marker):
    """Result of one benchmark on one model. Times are Unix seconds."""

    key: EvaluationKey
    origin: dict[str, JsonValue] = Field(default_factory=dict)
    """Source of the weights at the time of the evaluation: `run`, `iteration` and `weight_version`, or `model`, a
    folder. Other runs or folders may have equal weights."""
    attempt: str
    epoch: int = Field(ge=0)
    """Epoch of the claim under which the result was computed."""
    outputs: tuple[OutputFile, ...] = ()
    """Output files, with paths relative to the result's folder."""
    metrics: dict[str, float] = Field(default_factory=dict)
    values: dict[str, JsonValue] = Field(default_factory=dict)
    """Full description of the benchmark, for people to read. The key holds each of its digests."""
    adopted: str | None = None
    """The run's own step that sampled the rows, as `run/000039/eval.heldout-v000040`. With `@<digest>`: the commit of
    the run from which the rows were copied. None if the samples were generated for this result alone."""
    timings: dict[str, float] = Field(default_factory=dict)
    """Seconds by activity."""
    started_at: float
    committed_at: float
    environment: Environment

    @field_validator("attempt")
    @classmethod
    def _stays_in_its_folder(cls, name: str) -> str:
        return layout.check_name(name, "attempt")

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> "Evaluation":
        """Parse a result. Raises Damaged, naming `path`, unless `data` are the bytes that were committed at `path`."""
        with naming_damaged(f"result {path}", "delete its folder, and it is evaluated anew"):
            result = cls.unsealed(data)
            _require_sound(result)
        if layout.evaluation_result(result.key.folder) != path:
            raise Damaged(f"result {path} is in the wrong place: it names {result.key.folder}")
        return result


def _require_sound(result: Evaluation) -> None:
    """Raise ValueError unless a result has what every result has."""
    if not math.isfinite(score := result.metrics.get("score", math.nan)):
        raise ValueError(f"its score is {score}")
    iteration = result.origin.get("iteration")
    if iteration is not None and (type(iteration) is not int or iteration < 0):
        raise ValueError(f"its weights come from iteration {iteration!r:.100}")
    if len(result.outputs) != 1:
        raise ValueError(f"it has {len(result.outputs)} tables")


class Claim:
    """The right of this process to compute a result. As a context manager it releases the claim at the end."""

    def __init__(self, store: Store, key: EvaluationKey, lease: Lease):
        self.key = key
        self._store = store
        self._lease = lease

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and issubclass(kind, Exception)
        outcome = Outcome.COMPLETED if kind is None else Outcome.FAILED if failed else Outcome.STOPPED
        self._lease.release(outcome)

    def attempt(self) -> AttemptFolder:
        """Return a fresh folder for the files of the result."""
        name = layout.attempt_name(None, self._lease.epoch, uuid.uuid4().hex[:12])
        return AttemptFolder(self._store, self.key.folder, name, root=self.key.folder)

    def commit(
        self,
        attempt: AttemptFolder,
        *,
        outputs: tuple[OutputFile, ...],
        metrics: Mapping[str, float],
        values: Mapping[str, JsonValue],
        origin: Mapping[str, JsonValue],
        timings: Mapping[str, float],
        started_at: float,
        environment: Environment,
        adopted: str | None = None,
    ) -> Evaluation:
        """Create the result, or return the result that another process created first.

        Raises LeaseLost if another process holds the claim by now and there is no result.
        """
        made = Evaluation(
            schema_version=FORMAT,
            key=self.key,
            origin=dict(origin),
            attempt=attempt.name,
            epoch=self._lease.epoch,
            outputs=outputs,
            metrics=dict(metrics),
            values=dict(values),
            adopted=adopted,
            timings=dict(timings),
            started_at=started_at,
            committed_at=time.time(),
            environment=environment,
        )
        if self._store.create(layout.evaluation_result(self.key.folder), made.to_bytes(), self._lease.check):
            discard_superseded([attempt])
            return made
        found = find(self._store, self.key)
        assert found is not None  # results are never removed while somebody has the claim
        return found


def read(store: Store, folder: str) -> Evaluation | None:
    """Return the result in a folder, or None if there is none yet. Makes one request. Raises Damaged."""
    path = layout.evaluation_result(folder)
    try:
        return Evaluation.from_bytes(store.read(path), path)
    except FileNotFoundError:
        return None


def find(store: Store, key: EvaluationKey) -> Evaluation | None:
    """Return the result, or None if there is none. Makes one request. Raises Damaged."""
    found = read(store, key.folder)
    if found is not None and found.key != key:
        path = layout.evaluation_result(key.folder)
        raise Damaged(f"result {path} belongs to another model or benchmark whose digests start alike")
    return found


def find_or_claim(
    store: Store, key: EvaluationKey, waiting: Callable[[LeaseState | None], None] = lambda holder: None
) -> Evaluation | Claim:
    """Return the result, or the right to compute it.

    Waits while a living process holds that right, and calls `waiting` once for each such holder, with its lease.
    """
    reported: object = None
    while True:
        found = try_claim(store, key)
        if not isinstance(found, LeaseHeld):
            return found
        if found.holder != reported:
            reported = found.holder
            waiting(newest_lease(store, _owned(key)))
        time.sleep(LOOK_INTERVAL)


def try_claim(store: Store, key: EvaluationKey) -> Evaluation | Claim | LeaseHeld:
    """Return the result, the right to compute it, or LeaseHeld with the holder of that right. Does not wait.

    Raises Damaged.
    """
    found = find(store, key)
    if found is not None:
        return found
    try:
        lease = Lease.acquire(store, _owned(key))
    except LeaseHeld as refusal:
        return refusal
    found = find(store, key)  # another process may have created it before the claim
    if found is not None:
        lease.release(Outcome.COMPLETED)
        return found
    return Claim(store, key, lease)


def claimant(store: Store, folder: str) -> LeaseState | None:
    """Return the newest lease on the result of a folder, or None if there is none."""
    return newest_lease(store, LeaseSubject(layout.evaluation_claims(folder), folder, "evaluation"))


def read_samples(store: Store, result: Evaluation) -> pa.Table:
    """Return the rows of a result. Raises Damaged if they are missing or differ from what was committed."""
    (output,) = result.outputs
    path = f"{result.key.folder}/{output.path}"
    try:
        data = store.read(path)
    except FileNotFoundError:
        raise Damaged(f"{path} is committed but missing; expected {output.bytes} bytes") from None
    check_bytes(path, output, len(data), hashlib.sha256(data).hexdigest())
    try:
        return from_parquet(data)
    except ValueError as error:
        raise Damaged(f"{path} is not in Cairn's format: {error}") from error


def folders(store: Store) -> Iterator[str]:
    """Yield the store paths of the folders of all evaluations, with a result or without."""
    for entry in store.list(layout.EVALS):
        if (model := layout.parse_evaluated(entry)) is None:
            continue
        try:
            names = store.list(model)
        except LinkOutsideStore:  # no result is stored there
            continue
        for name in names:
            if (folder := layout.parse_evaluation(model, name)) is not None:
                yield folder


def results_with_prompts(store: Store, texts: Collection[str]) -> Iterator[str]:
    """Yield the folders of the results that contain one of these prompts, by prompt text.

    Includes results whose rows cannot be read.
    """
    for folder in folders(store):
        try:
            result = read(store, folder)
            prompts = set() if result is None else set(read_samples(store, result)["prompt_text"].to_pylist())
        except Damaged:
            prompts = set(texts)
        if prompts & set(texts):
            yield folder


def results(store: Store) -> Iterator[Evaluation]:
    """Yield all results of a store. Raises Damaged."""
    yield from (found for folder in folders(store) if (found := read(store, folder)) is not None)


def _owned(key: EvaluationKey) -> LeaseSubject:
    return LeaseSubject(layout.evaluation_claims(key.folder), key.folder.rpartition("/")[2], "evaluation")
