"""Read-only views of runs: where one stands, and what all of a store are.

Reading a run's status takes its newest iteration's commits, a few single ones and folder listings: it costs the same
after ten iterations as after ten thousand.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum

from pydantic import Field

from cairn.configs.errors import ConfigError
from cairn.configs.loader import from_manifest
from cairn.configs.schema.run import RunConfig
from cairn.flows.reading.gates import holding
from cairn.flows.reading.samples import Scores, evaluations, first_and_last_scores, generated_reward
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.decisions import GateStanding, GateState
from cairn.storage.ledger.leases import LeaseState, Outcome, newest_lease
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import Parent, list_runs
from cairn.storage.logs.write_ahead import waiting_groups
from cairn.storage.records import Record
from cairn.storage.store.errors import BeingDeleted, Damaged
from cairn.storage.store.store import Store
from cairn.storage.upkeep.self_tests import find_self_test
from cairn.tasks.durable.versions import version_of
from cairn.tasks.evaluation.evaluate import eval_shard
from cairn.tasks.halves import learning_steps, oldest_open
from cairn.tasks.trainer.score import needs_scores
from cairn.tasks.trainer.self_test import fingerprint

_RUNS_AT_A_TIME = 8


class RunState(StrEnum):
    """Where a run stands."""

    NEW = "new"
    """No driver has owned it: a fork, before its first `cairn resume`."""
    RUNNING = "running"
    """A live driver owns it."""
    COMPLETED = "completed"
    """Every iteration is done."""
    FAILED = "failed"
    """Its driver ended with an error; `cairn resume` goes on from the last commit."""
    INTERRUPTED = "interrupted"
    """Its driver was stopped or killed; `cairn resume` goes on from the last commit."""
    PREEMPTED = "preempted"
    """Its driver was told to end because the machine was wanted, and did; `cairn resume` goes on from there."""
    WAITING = "waiting"
    """It stands at a gate until a person decides, with its driver or without: `cairn approve` or `cairn reject`."""
    REJECTED = "rejected"
    """A person has decided at a gate that it shall not go on."""
    DAMAGED = "damaged"
    """A piece of the ledger is missing or altered; `cairn verify` says which."""
    DELETED = "deleted"
    """But not wholly: `cairn delete` was interrupted, and goes on if it is given again."""


class Driver(Record):
    """The process that owns the run, or was the last to own it."""

    epoch: int
    host: str
    pid: int
    since: float
    """Unix seconds."""
    outcome: Outcome | None


class Groups(Record):
    """What became of an iteration's prompts when its rollout was interrupted."""

    generated: int = 0
    """By the attempts that were committed."""
    recovered: int = 0
    """Finished by an attempt that was interrupted, and kept."""
    waiting: int = 0
    """Finished and durable, of shards that are not committed: a new attempt keeps them."""


class WrittenBy(Record):
    """A version of the code that committed to the run."""

    package: str
    commit: str | None
    since: float
    """Unix seconds."""


class Retries(Record):
    """What was tried again in an iteration."""

    by_error: dict[str, int] = Field(default_factory=dict)
    """New tries of steps, by the class of the error; `cairn.tasks.durable.retries` names the classes."""
    samples: int = 0
    """That were graded more than once."""
    waited: float = 0.0
    """Seconds before new tries."""


class RunStatus(Record):
    """A run at a glance. Times are Unix seconds."""

    run: str
    state: RunState
    parent: Parent | None = None
    """Where it was forked from."""
    iterations: int = 0
    """Complete ones."""
    num_rollout: int = 0
    """All that the run is to have."""
    iteration: int | None = None
    """The one it stands in; None when all are done."""
    step: Step | None = None
    """The next one there."""
    groups: Groups = Groups()
    """Of the newest iteration with any."""
    retries: Retries = Retries()
    """Of the newest iteration with any commit."""
    rollout_engines: int | None = None
    """That served when the newest batch of a run that streams was taken."""
    weight_version: int = 0
    state_digest: str | None = None
    same_bits: bool | None = None
    """Whether a self-test of the machine that trained last gave the same bits twice; None where there was none."""
    loss: float | None = None
    """Of the newest update."""
    reward: float | None = None
    """Mean of all samples that the newest iteration with a batch generated."""
    trained_reward: float | None = None
    """Mean of those that are trained on: its batch."""
    eval: dict[str, Scores] = Field(default_factory=dict)
    last_commit: str | None = None
    last_commit_at: float | None = None
    driver: Driver | None = None
    gate: GateStanding | None = None
    """Where it waits, or was rejected."""
    written_by: tuple[WrittenBy, ...] = ()
    """The versions of the code, in their order."""


def run_status(store: Store, run: str) -> RunStatus:
    """Where a run stands. Raises FileNotFoundError if there is none of this name, Damaged if its newest commits are."""
    ledger = Ledger.open(store, run)
    config = from_manifest(ledger.manifest.config)
    lease = newest_lease(store, run)
    last = ledger.last_iteration()
    commits = ledger.commits(last) if last is not None else []
    iteration, step = _place(ledger, config, last, commits)
    trained = _newest(ledger, Step.TRAIN, last, commits)
    graded = _newest(ledger, Step.ADVANTAGE, last, commits)
    newest = max(commits, key=lambda commit: commit.committed_at, default=None)
    gate = None if iteration is None else holding(ledger, iteration)
    return RunStatus(
        run=run,
        state=_state(lease, gate, done=iteration is None),
        parent=ledger.manifest.parent,
        iterations=config.rollout.num_rollout if iteration is None else iteration,
        num_rollout=config.rollout.num_rollout,
        iteration=iteration,
        step=step,
        groups=_groups(ledger, iteration, commits),
        retries=_retries(commits),
        rollout_engines=_rollout_engines(ledger, config, last, commits),
        weight_version=version_of(trained),
        state_digest=trained.state_digest if trained else None,
        same_bits=_same_bits(ledger, config, trained),
        loss=trained.metrics.get("loss") if trained else None,
        reward=generated_reward(ledger, graded) if graded else None,
        trained_reward=graded.metrics.get("raw_reward") if graded else None,
        eval=first_and_last_scores(ledger, config, last),
        last_commit=newest.name if newest else None,
        last_commit_at=newest.committed_at if newest else None,
        driver=_driver(lease),
        gate=gate,
        written_by=_written_by(ledger),
    )


def stands_in(ledger: Ledger, config: RunConfig) -> int | None:
    """The iteration in which a run stands: its oldest that is not complete; None when all are."""
    last = ledger.last_iteration()
    return _place(ledger, config, last, [] if last is None else ledger.commits(last))[0]


def _same_bits(ledger: Ledger, config: RunConfig, trained: Commit | None) -> bool | None:
    if trained is None:
        return None
    found = find_self_test(ledger.store, fingerprint(config, ledger.terms.inputs.get("model"), trained.environment))
    return found.agrees if found else None


def all_runs(store: Store) -> list[RunStatus]:
    """The status of every run in a store, by name."""

    def status(run: str) -> RunStatus:
        try:
            return run_status(store, run)
        except (Damaged, ConfigError):
            return RunStatus(run=run, state=RunState.DAMAGED)
        except BeingDeleted:
            return RunStatus(run=run, state=RunState.DELETED)

    with ThreadPoolExecutor(_RUNS_AT_A_TIME) as readers:
        return list(readers.map(status, list_runs(store)))


def next_step(ledger: Ledger, config: RunConfig, iteration: int, commits: Sequence[Commit]) -> Step | None:
    """The first step of an iteration that is not committed, None if all are. Shards being rolled out, graded and
    filtered at the same time count as `rollout`."""
    present = {commit.step for commit in commits}
    evaluated = {commit.shard for commit in commits if commit.step is Step.EVAL}
    places = [version for at, version in evaluations(ledger) if at == iteration]
    missing = [v for v in places if not evaluated.issuperset(eval_shard(b, v) for b in config.eval.benchmarks)]
    if 0 in missing:
        return Step.EVAL
    if not any(commit.step is Step.FILTER and commit.values["full"] for commit in commits):
        return Step.ROLLOUT
    steps = learning_steps(config, iteration, scored=_scored(ledger, config, iteration, present))
    return next((step for step in steps if step not in present), Step.EVAL if missing else None)


def _scored(ledger: Ledger, config: RunConfig, iteration: int, present: Collection[Step]) -> bool:
    """Whether an iteration has a score step: where its own steps do not tell, as in the iteration before. The loss
    knows in the first one, but ours take PyTorch's import to ask, and user code is not run to look at a ledger."""
    if Step.SCORE in present or Step.ADVANTAGE in present:
        return Step.SCORE in present
    if iteration > ledger.first_iteration:
        return ledger.find(iteration - 1, Step.SCORE) is not None
    ours = "." not in config.algorithm.advantage_estimator + config.algorithm.loss_type
    return ours and needs_scores(config)


def _place(
    ledger: Ledger, config: RunConfig, last: int | None, commits: Sequence[Commit]
) -> tuple[int | None, Step | None]:
    """The iteration in which a run stands and its next step; None twice when all is done."""
    newest = last or 0
    if newest < ledger.first_iteration:
        return ledger.first_iteration, Step.ROLLOUT
    for iteration in range(oldest_open(ledger), newest + 1):
        step = next_step(ledger, config, iteration, commits if iteration == newest else ledger.commits(iteration))
        if step is not None:
            return iteration, step
    if newest + 1 == config.rollout.num_rollout:
        return None, None
    return newest + 1, Step.ROLLOUT


def _newest(ledger: Ledger, step: Step, last: int | None, commits: Sequence[Commit]) -> Commit | None:
    """The newest commit of an unsharded step: in the newest iteration, or else in one that is open beside it, or the
    one before these."""
    found = next((commit for commit in commits if commit.step is step), None)
    earlier = range(last - 1, max(-1, last - 2 - ledger.lag), -1) if last else ()
    return found or next((commit for i in earlier if (commit := ledger.find(i, step)) is not None), None)


def _groups(ledger: Ledger, iteration: int | None, commits: Sequence[Commit]) -> Groups:
    """Those of the newest commits, and what waits in the iteration in which the run stands: reads the write-ahead parts
    of its shards that are not committed."""
    rollouts = [commit for commit in commits if commit.step is Step.ROLLOUT]
    done = {commit.shard for commit in rollouts if commit.iteration == iteration}
    size = from_manifest(ledger.manifest.config).group_size
    return Groups(
        generated=sum(int(commit.metrics["generated_groups"]) for commit in rollouts),
        recovered=sum(int(commit.metrics["recovered_groups"]) for commit in rollouts),
        waiting=0 if iteration is None else waiting_groups(ledger.store, ledger.run, iteration, done, size),
    )


def _rollout_engines(ledger: Ledger, config: RunConfig, last: int | None, commits: Sequence[Commit]) -> int | None:
    if last is None or config.rollout.pipeline != "streaming":
        return None
    for iteration in range(last, max(-1, last - 2 - ledger.lag), -1):
        found = commits if iteration == last else ledger.commits(iteration)
        takes = [commit for commit in found if commit.step is Step.ROLLOUT and "engines" in commit.metrics]
        if takes:
            return int(max(takes, key=lambda commit: commit.committed_at).metrics["engines"])
    return None


def _written_by(ledger: Ledger) -> tuple[WrittenBy, ...]:
    created = (ledger.manifest, ledger.manifest.created_at)
    upgraded = [(upgrade, upgrade.recorded_at) for upgrade in ledger.upgrades]
    return tuple(
        WrittenBy(package=terms.code_version.package, commit=terms.code_version.commit, since=since)
        for terms, since in (created, *upgraded)
    )


def _retries(commits: Sequence[Commit]) -> Retries:
    by_error: Counter[str] = Counter()
    for commit in commits:
        for name, count in commit.metrics.items():
            if name.startswith("retries/"):
                by_error[name.removeprefix("retries/")] += int(count)
    graded = sum(int(n) for c in commits for name, n in c.metrics.items() if name.endswith("graded_again"))
    waited = sum(c.timings.get(name, 0.0) for c in commits for name in ("retry_wait", "grader_wait"))
    return Retries(by_error=dict(sorted(by_error.items())), samples=graded, waited=waited)


def _state(lease: LeaseState | None, gate: GateStanding | None, done: bool) -> RunState:
    if gate is not None:
        return RunState.REJECTED if gate.state is GateState.REJECTED else RunState.WAITING
    if lease is None:
        return RunState.NEW
    if not lease.looks_over():
        return RunState.RUNNING
    if done:
        return RunState.COMPLETED
    if lease.outcome is Outcome.FAILED:
        return RunState.FAILED
    if lease.outcome is Outcome.PREEMPTED:
        return RunState.PREEMPTED
    return RunState.INTERRUPTED


def _driver(lease: LeaseState | None) -> Driver | None:
    if lease is None:
        return None
    holder = lease.holder
    return Driver(epoch=lease.epoch, host=holder.host, pid=holder.pid, since=lease.acquired_at, outcome=lease.outcome)
