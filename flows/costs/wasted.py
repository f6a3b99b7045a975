"""What of a run's work taught nothing, by its cause: what faults made necessary again, and what was thrown away."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from cairn.configs.schema.run import RunConfig
from cairn.flows.costs.device_time import device_seconds, devices, devices_of, driver_seconds, priced, tokens
from cairn.storage.commits import Commit, Step, newest_selection
from cairn.storage.leases import LeaseState, Outcome
from cairn.storage.records import Record

_DROPPED = "dynamic_filter/drop_"


class Waste(Record):
    """Work that taught nothing, by its cause."""

    cause: str
    count: int
    unit: str
    device_seconds: float | None = None
    """None where the ledger does not tell."""
    tokens: int | None = None
    price: float | None = None
    after_fault: bool
    """Whether something failed; else it is what the algorithm asked for."""


def wasted(
    iterations: Sequence[Sequence[Commit]],
    leases: Sequence[LeaseState],
    config: RunConfig,
    price_per_device_hour: float | None = None,
) -> tuple[Waste, ...]:
    """Of the commits of each iteration and all drivers of a run; causes that did not happen are left out."""
    commits = [commit for found in iterations for commit in found]
    found = [*_retried(commits, config), *_interrupted(commits, leases, config), *_dropped(iterations, config)]
    return tuple(
        waste.model_copy(update={"price": priced(waste.device_seconds, price_per_device_hour)})
        for waste in found
        if waste.count
    )


def _retried(commits: Sequence[Commit], config: RunConfig) -> Iterator[Waste]:
    """Tries that failed under the driver that committed, and what was waited before new ones."""
    tries: Counter[str] = Counter()
    lost, waited = 0.0, 0.0
    told = True
    for commit in commits:
        retries = {name: count for name, count in commit.metrics.items() if name.startswith("retries/")}
        if retries:
            tries.update({name.removeprefix("retries/"): int(count) for name, count in retries.items()})
            share = devices_of(commit, config)
            told = told and "failed_tries" in commit.timings
            lost += commit.timings.get("failed_tries", 0.0) * share
            waited += commit.timings.get("retry_wait", 0.0) * share
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(tries.items()))
    count = tries.total()
    yield Waste(
        cause=f"superseded attempts, at most ({kinds})",
        count=count,
        unit="tries",
        device_seconds=lost if told else None,
        after_fault=True,
    )
    yield Waste(cause="waits before new tries", count=count, unit="tries", device_seconds=waited, after_fault=True)
    replayed = [commit for commit in commits if commit.metrics.get("recovery/replayed_steps")]
    yield Waste(
        cause="replayed train steps",
        count=sum(int(commit.metrics["recovery/replayed_steps"]) for commit in replayed),
        unit="steps",
        device_seconds=sum(commit.timings["replay"] for commit in replayed) * devices(config).training,
        after_fault=True,
    )


def _interrupted(commits: Sequence[Commit], leases: Sequence[LeaseState], config: RunConfig) -> Iterator[Waste]:
    """What drivers that ended early took with them, and what the next ones needed to go on."""
    reserved = devices(config).reserved
    times = [(lease, driver_seconds(lease, [c for c in commits if c.epoch == lease.epoch])) for lease in leases]
    ended = [uncommitted for lease, (_, _, uncommitted) in times if lease.outcome is not Outcome.COMPLETED]
    early = [seconds for seconds in ended if seconds > 0]
    yield Waste(
        cause="uncommitted work of drivers that ended early, at most",
        count=len(early),
        unit="drivers",
        device_seconds=sum(early) * reserved,
        after_fault=True,
    )
    again = [starting for _, (_, starting, _) in times[1:]]
    yield Waste(
        cause="starts of further drivers",
        count=len(again),
        unit="drivers",
        device_seconds=sum(again) * reserved,
        after_fault=True,
    )
    rollouts = [c for c in commits if c.step is Step.ROLLOUT and c.metrics.get("recovered_groups")]
    yield Waste(
        cause="lost groups of interrupted shards, generated again, at most",
        count=sum(int(commit.metrics.get("generated_groups", 0)) for commit in rollouts),
        unit="groups",
        after_fault=True,
    )


def dropped_groups(commits: Sequence[Commit]) -> Mapping[str, int]:
    """Groups of an iteration that its last filter step dropped, by reason; `age` are those left over and too old."""
    selection = newest_selection(commits)
    metrics = {} if selection is None else selection.metrics
    dropped = Counter({name.removeprefix(_DROPPED): int(n) for name, n in metrics.items() if name.startswith(_DROPPED)})
    dropped["age"] = int(metrics.get("age/dropped_groups", 0))
    return +dropped


def _dropped(iterations: Sequence[Sequence[Commit]], config: RunConfig) -> Iterator[Waste]:
    """What was generated and not trained on; each group at the mean of its iteration."""
    groups, length = Counter[str](), Counter[str]()
    seconds: dict[str, float] = {}
    failed = 0
    for commits in iterations:
        rollouts = [commit for commit in commits if commit.step is Step.ROLLOUT]
        failed += sum(int(c.metrics.get("failed_samples", 0)) for c in commits if c.step is Step.REWARD)
        made = sum(c.metrics.get(name, 0) for c in rollouts for name in ("generated_groups", "recovered_groups"))
        for reason, count in dropped_groups(commits).items():
            share = count / made if made else 0.0
            groups[reason] += count
            seconds[reason] = seconds.get(reason, 0.0) + share * device_seconds(rollouts, config)
            length[reason] += round(share * sum(tokens(commit) or 0 for commit in rollouts))
    for reason, count in sorted(groups.items()):
        yield Waste(
            cause=f"dropped groups: {reason}",
            count=count,
            unit="groups",
            device_seconds=seconds[reason],
            tokens=length[reason],
            after_fault=reason == "failed_sample",
        )
    yield Waste(cause="failed samples", count=failed, unit="samples", after_fault=True)
