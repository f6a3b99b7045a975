"""Cost of a run: device-seconds and tokens by step, per accepted sample and per evaluation, and the wasted part.

Everything comes from the ledger: start and commit times of commits, the numbers in them, and the leases with the start
and end of each driver. A device is a GPU where the run has any, and else a thread of an engine. The reserved time of
the run's devices splits into:

    driver starts       first step begins                                last commit      driver ends
         │── starting ──────│── running steps, and idle devices ───────────────│── uncommitted ──│

so that `reserved = starting + work + idle + uncommitted`, in device-seconds.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import Literal, TypeVar

from cairn.configs.schema.algorithm import LearnsFrom
from cairn.configs.schema.run import RunConfig
from cairn.flows.reading.metrics import busy_seconds, read_iterations, retries
from cairn.storage.evals import Evaluation, results
from cairn.storage.ledger.commits import Commit, Step, newest_selection
from cairn.storage.ledger.leases import LeaseState, Outcome, all_leases
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.records import Record

# Reserved devices and their time, by use.


ConfigOf = Callable[[Commit], RunConfig]
"""Returns the configuration under which a commit was made, such as `Ledger.config_of`."""
ON_TRAINING = frozenset({Step.SCORE, Step.TRAIN, Step.CHECKPOINT, Step.SYNC})
"""Steps that run on the training engine."""


class Devices(Record):
    """Number of devices that a run reserves."""

    kind: Literal["GPU", "CPU"]
    rollout: float
    """Devices of all rollout engines together."""
    training: float
    """Devices of all training ranks together."""
    reserved: float
    """Devices of both; shared ones count once."""


def devices(config: RunConfig) -> Devices:
    """Return the devices that a run of this configuration reserves."""
    rollout, training = config.rollout, config.training
    generating = rollout.num_engines * rollout.num_gpus_per_engine
    updating = training.world_size * training.num_gpus_per_rank
    kind: Literal["GPU", "CPU"] = "GPU" if generating or updating else "CPU"
    if kind == "CPU":
        generating, updating = rollout.num_engines * rollout.num_threads, training.world_size * training.num_threads
    if not config.needs_rollout_engines:
        generating = 0
    reserved = max(generating, updating) if config.fleet.colocate else generating + updating
    return Devices(kind=kind, rollout=generating, training=updating, reserved=reserved)


def devices_of(commit: Commit, config: RunConfig) -> float:
    """Return the number of devices that a commit's work used while it lasted."""
    reserved = devices(config)
    if commit.step is Step.ROLLOUT:
        return reserved.rollout / config.rollout.num_engines
    if commit.step is Step.EVAL:
        return reserved.rollout
    return reserved.training if commit.step in ON_TRAINING else 0.0


def device_seconds(commits: Iterable[Commit], config_of: ConfigOf) -> float:
    """Return the device-seconds of commits of one step and iteration. Concurrent shards on one engine share its
    time."""
    commits = list(commits)
    if any("engines" in commit.timings for commit in commits):  # in a streaming run the step only waits
        return sum(commit.timings.get("engines", 0.0) * devices_of(commit, config_of(commit)) for commit in commits)
    shares: dict[tuple[int, float], list[Commit]] = {}
    for commit in commits:
        config = config_of(commit)
        engine = engine_of(commit, config) if commit.step is Step.ROLLOUT else 0
        shares.setdefault((engine, devices_of(commit, config)), []).append(commit)
    return sum(busy_seconds(own) * used for (_, used), own in shares.items())


def tokens(commit: Commit) -> int | None:
    """Return the number of tokens that the step generated or trained on.

    None for a step that does neither, such as a rollout step that reads responses from the data. An evaluation whose
    result was already stored generated none.
    """
    match commit.step:
        case Step.ROLLOUT:
            generated = commit.metrics.get("response_tokens")
            return None if generated is None else int(generated)
        case Step.TRAIN:
            return int(commit.metrics.get("tokens", 0))
        case Step.EVAL:
            name = commit.values["benchmark"]
            mean = 0.0 if "found" in commit.values else commit.metrics.get(f"eval/{name}/response_len/mean", 0.0)
            return round(rows(commit) * mean)
    return None


def driver_seconds(lease: LeaseState, commits: Sequence[Commit]) -> tuple[float, float, float]:
    """Return the seconds of one driver with these commits: in total, before its first step began, and after its last
    commit.

    The last number is 0 if the driver completed the run or is alive. A killed driver counts as alive until it last
    renewed its lease, which it does every `RENEWAL_INTERVAL` seconds.
    """
    end = max([lease.renewed_at, *(commit.committed_at for commit in commits)])
    if not commits:
        return end - lease.acquired_at, end - lease.acquired_at, 0.0
    starting = max(0.0, min(commit.started_at for commit in commits) - lease.acquired_at)
    is_done = lease.outcome is Outcome.COMPLETED or not lease.looks_over()
    uncommitted = 0.0 if is_done else end - max(c.committed_at for c in commits)
    return end - lease.acquired_at, starting, uncommitted


def priced(device_seconds: float | None, per_device_hour: float | None) -> float | None:
    """Return the price, in the currency of `per_device_hour`."""
    return None if device_seconds is None or per_device_hour is None else device_seconds / 3600 * per_device_hour


def rows(commit: Commit) -> int:
    """Return the number of rows of all tables of a commit."""
    return sum(output.rows or 0 for output in commit.tables)


def engine_of(commit: Commit, config: RunConfig) -> int:
    """Return the number of the engine that generated a rollout's shard `<round>-<part>`: parts go to engines
    round-robin."""
    return int((commit.shard or "0").rpartition("-")[2]) % config.rollout.num_engines


# Work without effect on training, by cause: work repeated after faults, and discarded samples.


_DROPPED = "dynamic_filter/drop_"


class Waste(Record):
    """Work without effect on training, by cause."""

    cause: str
    count: int
    unit: str
    device_seconds: float | None = None
    """Lost device-seconds; None where the ledger does not contain them."""
    tokens: int | None = None
    price: float | None = None
    after_fault: bool
    """Whether a fault was the cause; otherwise it is part of the algorithm."""


def wasted(
    iterations: Sequence[Sequence[Commit]],
    leases: Sequence[LeaseState],
    config_of: ConfigOf,
    config_under: Callable[[int], RunConfig],
) -> tuple[Waste, ...]:
    """Return the waste in the commits of each iteration and all drivers of a run, without causes that did not occur.
    `config_under`: returns the configuration of a driver by its epoch."""
    commits = list(chain.from_iterable(iterations))
    causes = chain(
        _retried(commits, config_of),
        _interrupted(commits, leases, config_under),
        _dropped(iterations, config_of),
    )
    return tuple(waste for waste in causes if waste.count)


def _retried(commits: Sequence[Commit], config_of: ConfigOf) -> Iterator[Waste]:
    """Yield failed attempts under the driver that committed, and waits before retries."""
    tries: Counter[str] = Counter()
    lost, waited = 0.0, 0.0
    complete = True
    for commit in commits:
        if counted := retries(commit):
            tries.update(counted)
            share = devices_of(commit, config_of(commit))
            complete = complete and "failed_tries" in commit.timings
            lost += commit.timings.get("failed_tries", 0.0) * share
            waited += commit.timings.get("retry_wait", 0.0) * share
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(tries.items()))
    count = tries.total()
    yield Waste(
        cause=f"superseded attempts, at most ({kinds})",
        count=count,
        unit="tries",
        device_seconds=lost if complete else None,
        after_fault=True,
    )
    yield Waste(cause="waits before new tries", count=count, unit="tries", device_seconds=waited, after_fault=True)
    replayed = [commit for commit in commits if commit.metrics.get("recovery/replayed_steps")]
    yield Waste(
        cause="replayed train steps",
        count=sum(int(commit.metrics["recovery/replayed_steps"]) for commit in replayed),
        unit="steps",
        device_seconds=sum(commit.timings["replay"] * devices(config_of(commit)).training for commit in replayed),
        after_fault=True,
    )


def _interrupted(
    commits: Sequence[Commit], leases: Sequence[LeaseState], config_under: Callable[[int], RunConfig]
) -> Iterator[Waste]:
    """Yield the lost work of drivers that ended early, and the start of the next ones."""
    reserved = {lease.epoch: devices(config_under(lease.epoch)).reserved for lease in leases}
    times = [(lease, driver_seconds(lease, [c for c in commits if c.epoch == lease.epoch])) for lease in leases]
    early = [
        uncommitted * reserved[lease.epoch]
        for lease, (_, _, uncommitted) in times
        if lease.outcome is not Outcome.COMPLETED and uncommitted > 0
    ]
    yield Waste(
        cause="uncommitted work of drivers that ended early, at most",
        count=len(early),
        unit="drivers",
        device_seconds=sum(early),
        after_fault=True,
    )
    restarts = [starting * reserved[lease.epoch] for lease, (_, starting, _) in times[1:]]
    yield Waste(
        cause="starts of further drivers",
        count=len(restarts),
        unit="drivers",
        device_seconds=sum(restarts),
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
    """Return the number of groups that an iteration's last filter step dropped, by reason; `age`: leftover groups that
    were too old."""
    selection = newest_selection(commits)
    metrics = {} if selection is None else selection.metrics
    dropped = Counter({name.removeprefix(_DROPPED): int(n) for name, n in metrics.items() if name.startswith(_DROPPED)})
    dropped["age"] = int(metrics.get("age/dropped_groups", 0))
    return +dropped


def _dropped(iterations: Sequence[Sequence[Commit]], config_of: ConfigOf) -> Iterator[Waste]:
    """Yield generated groups that were not trained on, each with the mean cost of its iteration."""
    groups, length = Counter[str](), Counter[str]()
    seconds: dict[str, float] = {}
    failed = 0
    for commits in iterations:
        rollouts = [commit for commit in commits if commit.step is Step.ROLLOUT]
        failed += sum(int(c.metrics.get("failed_samples", 0)) for c in commits if c.step is Step.REWARD)
        generated = sum(c.metrics.get(name, 0) for c in rollouts for name in ("generated_groups", "recovered_groups"))
        for reason, count in dropped_groups(commits).items():
            share = count / generated if generated else 0.0
            groups[reason] += count
            seconds[reason] = seconds.get(reason, 0.0) + share * device_seconds(rollouts, config_of)
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


class StepCost(Record):
    """Cost of one kind of step."""

    step: Step
    commits: int
    seconds: float
    """Seconds in which at least one of them was running."""
    device_seconds: float
    """Device-seconds; 0 for steps that use no device of the run."""
    tokens: int | None = None
    """Generated tokens, or trained ones, prompts included."""
    price: float | None = None


class EvaluationCost(Record):
    """Cost of a benchmark under one weight version."""

    benchmark: str
    trained: int
    """Number of iterations that the weights were trained for."""
    samples: int
    seconds: float
    device_seconds: float
    """Device-seconds of all rollout engines; benchmarks that ran concurrently count in full."""
    tokens: int
    price: float | None = None
    apart: bool = False
    """Whether `cairn eval` computed it, on its own engine, which is not among the run's reserved devices."""


class Costs(Record):
    """Cost of a run so far. For a fork, only its own iterations count: the shared ones belong to its parent."""

    run: str
    devices: Devices
    """Devices that it reserves in its newest layout. Times count those of the layout in which they were spent."""
    iterations: int
    """Number of iterations with commits."""
    drivers: int
    price_per_device_hour: float | None = None
    reserved_device_seconds: float
    starting_device_seconds: float
    idle_device_seconds: float
    uncommitted_device_seconds: float
    steps: tuple[StepCost, ...]
    learns_from: LearnsFrom = "responses"
    """Kind of the trained samples: responses are generated, the others come from the data."""
    generated_samples: int
    accepted_samples: int
    """Number of samples that were trained on."""
    device_seconds_per_accepted_sample: float | None
    """Reserved device-seconds per trained sample."""
    tokens_per_accepted_sample: float | None
    """Tokens generated for training per trained sample; where none are generated, tokens that the updates read, prompts
    included."""
    evaluations: tuple[EvaluationCost, ...]
    wasted: tuple[Waste, ...]
    price: float | None = None
    """Price of all reserved device-seconds."""


def step_costs(commits: Collection[Commit], config_of: ConfigOf) -> Iterator[StepCost]:
    """Yield the costs of some iterations' commits by step, in the order of the DAG."""
    for step in Step:
        own = sorted((commit for commit in commits if commit.step is step), key=attrgetter("iteration"))
        if own:
            by_iteration = [list(part) for _, part in groupby(own, attrgetter("iteration"))]
            counted = [count for commit in own if (count := tokens(commit)) is not None]
            yield StepCost(
                step=step,
                commits=len(own),
                seconds=sum(map(busy_seconds, by_iteration)),
                device_seconds=sum(device_seconds(part, config_of) for part in by_iteration),
                tokens=sum(counted) if counted else None,
            )


def evaluation_costs(commits: Iterable[Commit], config_of: ConfigOf) -> Iterator[EvaluationCost]:
    """Yield the cost of each benchmark at each weight version."""
    for commit in commits:
        if commit.step is Step.EVAL:
            yield EvaluationCost(
                benchmark=str(commit.values["benchmark"]),
                trained=commit.iteration + 1 if commit.weight_version_in else 0,
                samples=rows(commit),
                seconds=busy_seconds([commit]),
                device_seconds=device_seconds([commit], config_of),
                tokens=tokens(commit) or 0,
            )


def apart_costs(results: Iterable[Evaluation], run: str, config: RunConfig) -> Iterator[EvaluationCost]:
    """Yield the costs of stored results that were computed for weights of a run, each by one engine. Results adopted
    from the run's own evaluations are not counted again."""
    for result in results:
        if result.origin.get("run") == run and result.adopted is None:
            on_gpu = devices(config).kind == "GPU"
            used = config.rollout.num_gpus_per_engine if on_gpu else result.environment.threads
            seconds = result.committed_at - result.started_at
            samples = sum(output.rows or 0 for output in result.outputs)
            iteration = result.origin.get("iteration")
            yield EvaluationCost(
                benchmark=result.key.benchmark,
                trained=iteration + 1 if isinstance(iteration, int) else 0,
                samples=samples,
                seconds=seconds,
                device_seconds=seconds * used,
                tokens=round(samples * result.metrics.get("response_len_mean", 0.0)),
                apart=True,
            )


Cost = TypeVar("Cost", StepCost, EvaluationCost, Waste)


def with_prices(costs: Iterable[Cost], per_device_hour: float | None) -> tuple[Cost, ...]:
    """Return the costs with their prices, in the currency of `per_device_hour`."""
    return tuple(cost.model_copy(update={"price": priced(cost.device_seconds, per_device_hour)}) for cost in costs)


def run_costs(
    ledger: Ledger, price_per_device_hour: float | None = None, read: Iterable[Sequence[Commit]] | None = None
) -> Costs:
    """Return all costs of a run. Reads the results of evaluations in its store, but no samples.

    Args:
        read: commits of each iteration; None: they are read too.
    """
    leases = all_leases(ledger.store, ledger.run)
    first = ledger.first_iteration
    if read is None:
        read = read_iterations(ledger, [index for index in ledger.iterations() if index >= first])
    iterations = [commits for commits in read if commits and commits[0].iteration >= first]
    commits = list(chain.from_iterable(iterations))
    steps = with_prices(step_costs(commits, ledger.config_of), price_per_device_hour)
    config = ledger.config  # after the commits: their terms are among those that the ledger has read
    reserved = {lease.epoch: devices(ledger.config_under(lease.epoch)).reserved for lease in leases}
    by_version = attrgetter("trained", "benchmark")
    evaluations = [
        *sorted(evaluation_costs(commits, ledger.config_of), key=by_version),
        *sorted(apart_costs(results(ledger.store), ledger.run, config), key=by_version),
    ]
    drivers = [
        (reserved[lease.epoch], driver_seconds(lease, [c for c in commits if c.epoch == lease.epoch]))
        for lease in leases
    ]
    whole, starting, uncommitted = (sum(number * times[part] for number, times in drivers) for part in range(3))
    work = sum(cost.device_seconds for cost in steps)
    accepted = config.samples_per_rollout * sum(commit.step is Step.TRAIN for commit in commits)
    learns_from = config.algorithm.learns_from
    rollouts = [c for c in commits if c.step is Step.ROLLOUT] if config.samples_responses else []
    generated = sum(int(commit.metrics.get("samples", 0)) for commit in rollouts)
    counted = Step.ROLLOUT if config.samples_responses else Step.TRAIN
    sample_tokens = sum(cost.tokens or 0 for cost in steps if cost.step is counted)
    return Costs(
        run=ledger.run,
        devices=devices(config),
        iterations=len(iterations),
        drivers=len(leases),
        price_per_device_hour=price_per_device_hour,
        reserved_device_seconds=whole,
        starting_device_seconds=starting,
        idle_device_seconds=max(0.0, whole - starting - uncommitted - work),
        uncommitted_device_seconds=uncommitted,
        steps=steps,
        learns_from=learns_from,
        generated_samples=generated,
        accepted_samples=accepted,
        device_seconds_per_accepted_sample=whole / accepted if accepted else None,
        tokens_per_accepted_sample=sample_tokens / accepted if accepted else None,
        evaluations=with_prices(evaluations, price_per_device_hour),
        wasted=with_prices(wasted(iterations, leases, ledger.config_of, ledger.config_under), price_per_device_hour),
        price=priced(whole, price_per_device_hour),
    )
