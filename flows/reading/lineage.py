"""Lineage of one sample, or of one of its tokens: its origin and its use, found by following digests in the ledger.

    prompt row ─▶ rollout ─▶ reward ─▶ filter ─▶ advantage ─▶ train ─▶ checkpoint, sync
                     ▲                                           │
                  weights (an earlier train step)             weights

It reads about a dozen commits and a row of each table, whatever the length of the run, and one marker for each
iteration after the update to find the checkpoints. Every commit and table is checked against its digest.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cairn.configs.loader import from_manifest
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import DATA, Disposition
from cairn.storage.ledger.snapshots import read_table, sample_rows
from cairn.storage.records import Environment, Record
from cairn.storage.store.canonical import from_json

# Records of a lineage. None means not yet, or unknown.


class CommitReference(Record):
    """The commit that recorded a fact."""

    name: str
    """`000042/train`, as in `cairn verify`."""
    iteration: int
    run: str
    """Name of the run that made it: for shared iterations of a fork, the parent."""
    digest: str


class Prompt(Record):
    """Row of the data set."""

    data: str
    """Path or URL of the data, as the run's configuration names it."""
    data_digest: str | None
    row: int
    """Number of the row, from 0."""
    epoch: int
    text: str
    label: str | None
    metadata: str | None
    tokens: int


class Weights(Record):
    """A weight version that sampled tokens of the response."""

    version: int
    state_digest: str | None = None
    """Digest of weights and optimizer after the train step; None: the run's initial weights."""
    published_digest: str | None = None
    """Digest of the weights that the rollout engine was required to have."""
    made_by: CommitReference | None = None


class Sampled(Record):
    """The response and its origin."""

    response: str
    tokens: int
    log_prob: float | None
    """Sum over the tokens, under the rollout engine; None where the data contain the response."""
    finish_reason: str
    status: str
    error: str | None
    seed: int
    engine: str
    seconds: float
    segments: int
    weights: tuple[Weights, ...]
    """Several where the response was resumed after an update; none where the data contain the response."""
    model_digest: str | None
    """Digest of the folder of the initial weights."""
    environment: Environment
    """Environment of the engine."""
    made_by: CommitReference


class Grade(Record):
    """Reward of the sample and its grader."""

    reward: float | None
    components: str | None
    grader: str
    grader_version: str
    sources: dict[str, str]
    """Digests of the user's grader and of the modules that it imports, by the option that names it; none for a
    built-in grader, whose version is in `environment`."""
    status: str
    error: str | None
    environment: Environment
    made_by: CommitReference


class Judgement(Record):
    """Decision of an iteration's filter about the sample's group."""

    iteration: int
    disposition: str
    reason: str | None
    mean_reward: float | None
    std_reward: float | None
    made_by: CommitReference


class Update(Record):
    """The train step that used the sample."""

    reward: float | None
    """Reward that the update used; None: it uses no rewards."""
    advantage: float | None
    """Mean over the response's tokens."""
    age: int | None
    """Age of its oldest token, in publications."""
    weight_version_in: int | None
    weight_version_out: int | None
    state_digest: str | None
    published_digest: str | None
    loss: float | None
    samples: int
    """Number of samples in the batch."""
    estimated_by: CommitReference | None
    """Commit of the advantages; None: the update uses none."""
    made_by: CommitReference


class Checkpoint(Record):
    """A restore point whose weights were trained on the sample."""

    iteration: int
    run: str
    state_digest: str | None
    retired: bool
    """Whether retention removed its files."""


class Token(Record):
    """A token of the response."""

    position: int
    token_id: int
    segment: int
    log_prob: float | None
    """Log-prob under the rollout engine; None where the data contain the response."""
    loss_mask: int
    weight_version: int
    advantage: float | None
    returned: float | None
    age: int | None
    """Age when it was trained on, in publications."""
    old_log_prob: float | None
    """Log-prob under the policy before the update; None: not scored."""
    ref_log_prob: float | None
    teacher_log_prob: float | None
    value: float | None
    ratio: float | None
    """Probability under the policy before the update divided by that under the rollout engine."""


class Lineage(Record):
    """Origin and use of a sample."""

    run: str
    iteration: int
    """Iteration that generated the sample."""
    shard: str | None
    group_id: int
    sample_index: int
    prompt: Prompt
    sampled: Sampled
    grade: Grade | None
    judgements: tuple[Judgement, ...]
    update: Update | None
    checkpoints: tuple[Checkpoint, ...]
    token: Token | None


_WAITS = {Disposition.BUFFER, Disposition.CONTINUE}


def lineage(ledger: Ledger, iteration: int, group_id: int, sample_index: int, token: int | None = None) -> Lineage:
    """Return the origin and the use of a sample, and of its token number `token`. `iteration` is the one that generated
    it, or one whose filter decided about it.

    Raises LookupError if there is none, WasImported, Retired if retention removed the tables, and Damaged.
    """
    ledger.manifest.require_own("record of data, weights and updates")
    rollout = _rollout_of(ledger, iteration, group_id)
    key = (group_id, sample_index)
    row = sample_row(ledger, rollout, key) if rollout is not None else None
    if rollout is None or row is None:
        raise LookupError(_missing(ledger, iteration, group_id, sample_index, rollout))
    tokens = len(row["response_ids"])
    if token is not None and not 0 <= token < tokens:
        raise LookupError(
            f"the response has tokens 0 to {tokens - 1}, not {token}" if tokens else "the response is empty"
        )
    graded = ledger.find(rollout.iteration, Step.REWARD, rollout.shard)
    grade = None if graded is None else sample_row(ledger, graded, key)
    judgements = list(_judgements(ledger, rollout, group_id))
    trained_in = next((j.iteration for j in judgements if j.disposition == Disposition.TRAIN), None)
    advantage = None if trained_in is None else ledger.find(trained_in, Step.ADVANTAGE)
    estimated = None if advantage is None else sample_row(ledger, advantage, key)
    update = None if trained_in is None else _update(ledger, trained_in, rollout, advantage, estimated)
    return Lineage(
        run=ledger.run,
        iteration=rollout.iteration,
        shard=rollout.shard,
        group_id=group_id,
        sample_index=sample_index,
        prompt=_prompt(ledger, rollout, row),
        sampled=_sampled(ledger, rollout, row),
        grade=None if graded is None or grade is None else _grade(ledger, graded, grade),
        judgements=tuple(judgements),
        update=update,
        checkpoints=() if update is None else tuple(_checkpoints(ledger, update.made_by.iteration)),
        token=None if token is None else _token(ledger, row, estimated, trained_in, key, token),
    )


def _rollout_of(ledger: Ledger, iteration: int, group_id: int) -> Commit | None:
    """Return the commit with a group's samples from the point of view of an iteration; None without one."""
    selection = _newest_selection(ledger, iteration)
    if selection is not None:
        for row in _rows(ledger, selection, pc.field("group_id") == group_id):
            return ledger.find(row["iteration"], Step.ROLLOUT, row["shard"])
    for commit in ledger.commits(iteration):  # not filtered yet
        if commit.step is Step.ROLLOUT and _rows(ledger, commit, pc.field("group_id") == group_id):
            return commit
    return None


def _newest_selection(ledger: Ledger, iteration: int) -> Commit | None:
    """Return the filter step of the last round; None without one."""
    newest, rounds = None, 0
    while (selection := ledger.find(iteration, Step.FILTER, f"{rounds:02d}")) is not None:
        newest, rounds = selection, rounds + 1
    return newest


def _judgements(ledger: Ledger, rollout: Commit, group_id: int) -> Iterator[Judgement]:
    """Yield the filter steps' decisions about the group, from its rollout's iteration until it is trained on or
    dropped."""
    iteration = rollout.iteration
    while (selection := _newest_selection(ledger, iteration)) is not None:
        here = (pc.field("group_id") == group_id) & (pc.field("iteration") == rollout.iteration)
        rows = _rows(ledger, selection, here & (pc.field("shard") == rollout.shard))
        for row in rows:
            yield Judgement(
                iteration=iteration,
                made_by=_reference(selection),
                **_columns(row, "disposition", "reason", "mean_reward", "std_reward"),
            )
        if not rows or rows[0]["disposition"] not in _WAITS:
            return
        iteration += 1


def _prompt(ledger: Ledger, rollout: Commit, row: dict[str, Any]) -> Prompt:
    terms = ledger.terms_of(rollout)
    return Prompt(
        data=" + ".join(from_manifest(terms.config).data.paths),
        data_digest=terms.inputs.get("data"),
        row=row["prompt_index"],
        epoch=row["epoch"],
        text=row["prompt_text"],
        label=row["label"],
        metadata=row["metadata"],
        tokens=len(row["prompt_ids"]),
    )


def _sampled(ledger: Ledger, rollout: Commit, row: dict[str, Any]) -> Sampled:
    versions = sorted(set(row["weight_versions"])) or [rollout.weight_version_in or 0]
    return Sampled(
        response=row["response_text"],
        tokens=len(row["response_ids"]),
        log_prob=None if row["engine"] == DATA else float(sum(row["log_probs"])),
        segments=len(row["segments"] or [None]),
        weights=() if row["engine"] == DATA else tuple(_weights(ledger, rollout, version) for version in versions),
        model_digest=ledger.terms_of(rollout).inputs.get("model"),
        environment=rollout.environment,
        made_by=_reference(rollout),
        **_columns(row, "finish_reason", "status", "error", "seed", "engine", "seconds"),
    )


def _weights(ledger: Ledger, rollout: Commit, version: int) -> Weights:
    """Return a version that sampled tokens of the rollout: the newest, or an earlier one where the response was
    resumed."""
    trained = _train_step(rollout)
    while trained is not None and trained >= 0:
        commit = ledger.find(trained, Step.TRAIN)
        if commit is None or (commit.weight_version_out or 0) < version:
            break
        if commit.weight_version_out == version:
            return Weights(
                version=version,
                state_digest=commit.state_digest,
                published_digest=_published(ledger, trained),
                made_by=_reference(commit),
            )
        trained -= 1
    return Weights(version=version)


def _train_step(commit: Commit) -> int | None:
    """Return the iteration whose weights a step read; None: the run's initial ones."""
    inputs = [name.partition("/") for name in commit.inputs]
    return next((int(iteration) for iteration, _, step in inputs if step == Step.TRAIN), None)


def _grade(ledger: Ledger, commit: Commit, row: dict[str, Any]) -> Grade:
    sources = {name: digest for name, digest in ledger.terms_of(commit).inputs.items() if name.startswith("reward.")}
    return Grade(
        sources=sources,
        environment=commit.environment,
        made_by=_reference(commit),
        **_columns(row, "reward", "components", "grader", "grader_version", "status", "error"),
    )


def _update(
    ledger: Ledger, iteration: int, rollout: Commit, advantage: Commit | None, row: dict[str, Any] | None
) -> Update | None:
    """Return the update; None until the train step is committed. `row`: of the advantage step, where there is one."""
    trained = ledger.find(iteration, Step.TRAIN)
    if trained is None:
        return None
    ages = (row or {}).get("ages")
    return Update(
        reward=None if row is None else row["reward"],
        advantage=None if row is None else _mean(row["advantages"]),
        age=None if ages is None else max(ages, default=None),
        weight_version_in=trained.weight_version_in,
        weight_version_out=trained.weight_version_out,
        state_digest=trained.state_digest,
        published_digest=_published(ledger, iteration),
        loss=trained.metrics.get("loss"),
        samples=(advantage or rollout).table.rows or 0,
        estimated_by=None if advantage is None else _reference(advantage),
        made_by=_reference(trained),
    )


def _checkpoints(ledger: Ledger, trained: int) -> Iterator[Checkpoint]:
    """Yield all checkpoints since the update: their weights were trained on the sample."""
    last = ledger.last_iteration()
    if last is None:
        return
    owners = {iteration: ledger.owner(iteration).run for iteration in range(trained, last + 1)}
    retirements = {
        (owner, place)
        for owner in set(owners.values())
        for name in ledger.store.list(layout.retirements(owner))
        if (place := layout.parse_retired(name)) is not None
    }
    paths = [layout.commit(owner, iteration, Step.CHECKPOINT) for iteration, owner in owners.items()]
    for (iteration, owner), data in zip(owners.items(), ledger.store.read_many(paths), strict=True):
        if data is not None:
            fields = from_json(data)
            retired = (owner, (iteration, layout.Kind.CHECKPOINT)) in retirements
            yield Checkpoint(iteration=iteration, run=owner, state_digest=fields["state_digest"], retired=retired)


def _token(
    ledger: Ledger,
    row: dict[str, Any],
    estimated: dict[str, Any] | None,
    trained_in: int | None,
    key: tuple[int, int],
    token: int,
) -> Token:
    scored = None if trained_in is None else ledger.find(trained_in, Step.SCORE)
    scores = None if scored is None else sample_row(ledger, scored, key)
    ends = accumulate(segment["tokens"] for segment in row["segments"] or [])
    old, sampled = _at(scores, "log_probs", token), row["log_probs"][token]
    if row["engine"] == DATA:  # the policy did not sample it
        sampled = None
    return Token(
        position=token,
        token_id=row["response_ids"][token],
        segment=sum(end <= token for end in ends),
        log_prob=sampled,
        loss_mask=row["loss_mask"][token],
        weight_version=row["weight_versions"][token],
        advantage=_at(estimated, "advantages", token),
        returned=_at(estimated, "returns", token),
        age=_at(estimated, "ages", token),
        old_log_prob=old,
        ref_log_prob=_at(scores, "ref_log_probs", token),
        teacher_log_prob=_at(scores, "teacher_log_probs", token),
        value=_at(scores, "values", token),
        ratio=None if old is None or sampled is None else math.exp(old - sampled),
    )


def _at(row: Mapping[str, Any] | None, column: str, token: int) -> Any:
    """Return a token's value in a list column; None where the row or the list is missing."""
    values = (row or {}).get(column)
    return None if values is None else values[token]


def _rows(ledger: Ledger, commit: Commit, condition: pc.Expression) -> list[dict[str, Any]]:
    table: pa.Table = read_table(ledger.store, commit.run, commit.table)
    return table.filter(condition).to_pylist()


def sample_row(ledger: Ledger, commit: Commit, key: tuple[int, int]) -> dict[str, Any] | None:
    """Return the row of sample `key`, a group and an index in it, in the only table of a commit; None without one."""
    return sample_rows(read_table(ledger.store, commit.run, commit.table), {key[0]}).get(key)


def _columns(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names}


def _missing(ledger: Ledger, iteration: int, group_id: int, sample_index: int, rollout: Commit | None) -> str:
    if rollout is not None:
        return f"group {group_id} of iteration {iteration} of run {ledger.run!r} has no sample {sample_index}"
    groups = {
        row
        for commit in ledger.commits(iteration)
        if commit.step is Step.ROLLOUT
        for row in read_table(ledger.store, commit.run, commit.table, ["group_id"]).column(0).to_pylist()
    }
    has = f"it has groups {min(groups)} to {max(groups)}" if groups else "it has no samples"
    return f"run {ledger.run!r} has no group {group_id} in iteration {iteration}; {has}"


def _reference(commit: Commit) -> CommitReference:
    return CommitReference(name=commit.name, iteration=commit.iteration, run=commit.run, digest=commit.digest)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _published(ledger: Ledger, iteration: int) -> str | None:
    """Return the digest of the weights that an iteration published."""
    commit = ledger.find(iteration, Step.SYNC)
    digest = None if commit is None else commit.values.get("digest")
    return digest if isinstance(digest, str) else None
