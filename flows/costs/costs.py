"""What a run cost: device-seconds and tokens by step, per accepted sample and per evaluation, and what was wasted.

Read from the ledger alone: from when commits began and were committed, from the numbers in them, and from the leases,
which say when each driver came and went. A device is a GPU where the run has any, and else a thread of an engine's. The
time of the devices that a run had reserved is told apart so:

    driver comes        first step begins                                last commit      driver goes
         │── starting ──────│── steps at work, and idle devices ───────────────│── uncommitted ──│

so that `reserved = starting + work + idle + uncommitted`, in device-seconds.
"""

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

from cairn.configs.loader import from_manifest
from cairn.configs.schema.algorithm import LearnsFrom
from cairn.configs.schema.run import RunConfig
from cairn.flows.costs.device_time import Devices, device_seconds, devices, driver_seconds, priced, rows, tokens
from cairn.flows.costs.wasted import Waste, wasted
from cairn.flows.reading.metrics import busy_seconds
from cairn.storage.commits import Commit, Step
from cairn.storage.evals import Evaluation, results
from cairn.storage.leases import all_leases
from cairn.storage.ledger import Ledger
from cairn.storage.records import Record

_REQUESTS = 8


class StepCost(Record):
    """What one kind of step took."""

    step: Step
    commits: int
    seconds: float
    """In which at least one of them was at work."""
    device_seconds: float
    """0 for steps on no device of the run."""
    tokens: int | None = None
    """Generated, or trained on, prompts included."""
    price: float | None = None


class EvaluationCost(Record):
    """What a benchmark took under one weight version."""

    benchmark: str
    trained: int
    """Iterations that the weights were trained for."""
    samples: int
    seconds: float
    device_seconds: float
    """Of all rollout engines; benchmarks that shared them in that time count whole."""
    tokens: int
    price: float | None = None
    apart: bool = False
    """By `cairn eval`, on an engine of its own, which is not among what the run reserved."""


class Costs(Record):
    """What a run cost so far. A fork's are its own iterations': the shared ones are its parent's."""

    run: str
    devices: Devices
    iterations: int
    """With commits."""
    drivers: int
    price_per_device_hour: float | None = None
    reserved_device_seconds: float
    starting_device_seconds: float
    idle_device_seconds: float
    uncommitted_device_seconds: float
    steps: tuple[StepCost, ...]
    learns_from: LearnsFrom = "responses"
    """Of what the samples are that were trained on: responses are generated, all else stands in the data."""
    generated_samples: int
    accepted_samples: int
    """That were trained on."""
    device_seconds_per_accepted_sample: float | None
    """Of all that was reserved."""
    tokens_per_accepted_sample: float | None
    """Generated in training for each of them; where nothing is, those that the updates took in, prompts included."""
    evaluations: tuple[EvaluationCost, ...]
    wasted: tuple[Waste, ...]
    price: float | None = None
    """Of all that was reserved."""


def step_costs(
    commits: Collection[Commit], config: RunConfig, price_per_device_hour: float | None = None
) -> tuple[StepCost, ...]:
    """Of some iterations' commits, by step, in the order of the DAG."""
    found = []
    for step in Step:
        own = [commit for commit in commits if commit.step is step]
        if own:
            by_iteration = _by(own, lambda commit: commit.iteration).values()
            spent = sum(device_seconds(part, config) for part in by_iteration)
            counted = [count for commit in own if (count := tokens(commit)) is not None]
            found.append(
                StepCost(
                    step=step,
                    commits=len(own),
                    seconds=sum(map(busy_seconds, by_iteration)),
                    device_seconds=spent,
                    tokens=sum(counted) if counted else None,
                    price=priced(spent, price_per_device_hour),
                )
            )
    return tuple(found)


def evaluation_costs(
    commits: Iterable[Commit], config: RunConfig, price_per_device_hour: float | None = None
) -> tuple[EvaluationCost, ...]:
    """Of each benchmark at each version that it was run with, in that order."""
    found = []
    for commit in commits:
        if commit.step is Step.EVAL:
            spent = device_seconds([commit], config)
            found.append(
                EvaluationCost(
                    benchmark=str(commit.values["benchmark"]),
                    trained=commit.iteration + 1 if commit.weight_version_in else 0,
                    samples=rows(commit),
                    seconds=busy_seconds([commit]),
                    device_seconds=spent,
                    tokens=tokens(commit) or 0,
                    price=priced(spent, price_per_device_hour),
                )
            )
    return tuple(sorted(found, key=lambda cost: (cost.trained, cost.benchmark)))


def apart_costs(
    results: Iterable[Evaluation], run: str, config: RunConfig, price_per_device_hour: float | None = None
) -> tuple[EvaluationCost, ...]:
    """Of the results in a store that were computed for weights of a run, each by one engine. What was adopted from the
    run's own evaluations is not counted again."""
    found = []
    for result in results:
        if result.origin.get("run") == run and result.adopted is None:
            on_gpu = devices(config).kind == "GPU"
            held = config.rollout.num_gpus_per_engine if on_gpu else result.environment.threads
            seconds = result.committed_at - result.started_at
            samples = sum(output.rows or 0 for output in result.outputs)
            iteration = result.origin.get("iteration")
            found.append(
                EvaluationCost(
                    benchmark=result.key.benchmark,
                    trained=iteration + 1 if isinstance(iteration, int) else 0,
                    samples=samples,
                    seconds=seconds,
                    device_seconds=seconds * held,
                    tokens=round(samples * result.metrics.get("response_len_mean", 0.0)),
                    price=priced(seconds * held, price_per_device_hour),
                    apart=True,
                )
            )
    return tuple(sorted(found, key=lambda cost: (cost.trained, cost.benchmark)))


def run_costs(ledger: Ledger, price_per_device_hour: float | None = None) -> Costs:
    """All of a run's costs. Reads every commit of it, the results of evaluations in its store, and no samples."""
    config, leases = from_manifest(ledger.manifest.config), all_leases(ledger.store, ledger.run)
    own = [iteration for iteration in ledger.iterations() if iteration >= ledger.first_iteration]
    with ThreadPoolExecutor(_REQUESTS) as readers:
        iterations = [commits for commits in readers.map(ledger.commits, own) if commits]
    commits = [commit for found in iterations for commit in found]
    held, steps = devices(config), step_costs(commits, config, price_per_device_hour)
    drivers = [driver_seconds(lease, [c for c in commits if c.epoch == lease.epoch]) for lease in leases]
    whole, starting, uncommitted = (held.reserved * sum(times[part] for times in drivers) for part in range(3))
    work = sum(cost.device_seconds for cost in steps)
    accepted = config.samples_per_rollout * sum(commit.step is Step.TRAIN for commit in commits)
    learns_from = config.algorithm.learns_from
    rollouts = [c for c in commits if c.step is Step.ROLLOUT] if config.samples_responses else []
    generated = sum(int(commit.metrics.get("samples", 0)) for commit in rollouts)
    counted = Step.ROLLOUT if config.samples_responses else Step.TRAIN
    sample_tokens = sum(cost.tokens or 0 for cost in steps if cost.step is counted)
    return Costs(
        run=ledger.run,
        devices=held,
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
        evaluations=(
            *evaluation_costs(commits, config, price_per_device_hour),
            *apart_costs(results(ledger.store), ledger.run, config, price_per_device_hour),
        ),
        wasted=wasted(iterations, leases, config, price_per_device_hour),
        price=priced(whole, price_per_device_hour),
    )


def _by(commits: Iterable[Commit], key: Callable[[Commit], int]) -> dict[int, list[Commit]]:
    groups: dict[int, list[Commit]] = {}
    for commit in commits:
        groups.setdefault(key(commit), []).append(commit)
    return groups
