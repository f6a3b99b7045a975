"""What the samples of a run scored: its evaluations, by benchmark, and the mean reward of what it generated."""

from collections.abc import Iterator, Mapping, Sequence

from cairn.configs.loader import from_manifest
from cairn.configs.schema.evaluation import BenchmarkConfig
from cairn.configs.schema.run import RunConfig
from cairn.storage.commits import Commit, Step
from cairn.storage.ledger import Ledger
from cairn.storage.records import Record
from cairn.tasks.evaluate import eval_due, eval_shard, initial_eval_due
from cairn.tasks.versions import weight_version_after


class Scores(Record):
    """A benchmark's scores, in which failed samples count as wrong; None where there are none yet."""

    first: float | None
    last: float | None
    first_graded: float | None = None
    """Mean reward of the samples that were graded."""
    last_graded: float | None = None
    first_failed: int = 0
    """Samples that could not be generated or graded."""
    last_failed: int = 0


def evaluations(ledger: Ledger) -> Iterator[tuple[int, int]]:
    """(iteration, weight version) of every evaluation of a run; the first iteration holds that of the initial weights
    too."""
    config = from_manifest(ledger.manifest.config)
    if ledger.parent is not None:
        yield from (place for place in evaluations(ledger.parent) if place[0] < ledger.first_iteration)
    elif initial_eval_due(config):
        yield 0, 0
    first, steps = ledger.first_iteration, config.training.num_steps_per_rollout
    before = weight_version_after(ledger, first - 1)
    for iteration in range(first, config.rollout.num_rollout):
        if eval_due(config, iteration):
            yield iteration, before + (iteration + 1 - first) * steps


def benchmark_scores(ledger: Ledger, config: RunConfig) -> dict[str, dict[int, float]]:
    """Every score of every benchmark, by the iterations that the weights were trained for. Where samples failed, the
    mean over the others stands under `<benchmark>, graded`."""
    last = ledger.last_iteration()
    if last is None:
        return {}
    scores: dict[str, dict[int, float]] = {benchmark.name: {} for benchmark in config.eval.benchmarks}
    for iteration, version in evaluations(ledger):
        for benchmark in config.eval.benchmarks if iteration <= last else ():
            commit = ledger.find(iteration, Step.EVAL, eval_shard(benchmark, version))
            if commit is None or benchmark.name not in commit.metrics:
                continue
            trained = iteration + 1 if version else 0
            scores[benchmark.name][trained] = commit.metrics[benchmark.name]
            graded = graded_score(commit.metrics, benchmark.name)
            if graded is not None and commit.metrics.get(f"{benchmark.name}-failed_samples"):
                scores.setdefault(f"{benchmark.name}, graded", {})[trained] = graded
    return scores


def first_and_last_scores(ledger: Ledger, config: RunConfig, last: int | None) -> dict[str, Scores]:
    """The first and the newest score of every benchmark, reading no others."""
    places = [place for place in evaluations(ledger) if last is not None and place[0] <= last]

    def metrics(benchmark: BenchmarkConfig, places: Sequence[tuple[int, int]]) -> Mapping[str, float]:
        for iteration, version in places:
            commit = ledger.find(iteration, Step.EVAL, eval_shard(benchmark, version))
            if commit is not None:
                return commit.metrics
        return {}

    def scores(benchmark: BenchmarkConfig) -> Scores:
        name = benchmark.name
        first, last = metrics(benchmark, places[:1]), metrics(benchmark, places[::-1])
        return Scores(
            first=first.get(name),
            last=last.get(name),
            first_graded=graded_score(first, name),
            last_graded=graded_score(last, name),
            first_failed=int(first.get(f"{name}-failed_samples", 0)),
            last_failed=int(last.get(f"{name}-failed_samples", 0)),
        )

    return {benchmark.name: scores(benchmark) for benchmark in config.eval.benchmarks}


def generated_reward(ledger: Ledger, trained: Commit) -> float | None:
    """Mean reward of all samples that an iteration generated, by its advantage step's commit; of those that it trained
    on where the filter step has not told it; None where nothing is graded. One request."""
    shard = next(name.partition("/filter.")[2] for name in trained.inputs if "/filter." in name)
    selection = ledger.find(trained.iteration, Step.FILTER, shard)
    metrics = trained.metrics if selection is None else {**trained.metrics, **selection.metrics}
    return metrics.get("raw_reward")


def graded_score(metrics: Mapping[str, float], benchmark: str) -> float | None:
    """The mean over the samples that were graded, of an evaluation's metrics as its commit names them."""
    return metrics.get(f"{benchmark}-graded", metrics.get(benchmark))
