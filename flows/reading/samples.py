"""The samples of one iteration for people: prompt, response, reward, advantage and the filter's decision."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from cairn.configs.loader import from_manifest
from cairn.configs.schema.evaluation import BenchmarkConfig
from cairn.configs.schema.run import RunConfig
from cairn.flows.reading.episodes import EpisodeView, episodes
from cairn.storage.ledger.commits import Commit, Step, newest_selection
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import IMAGES, Disposition
from cairn.storage.ledger.snapshots import read_recorded_table, read_table, sample_rows
from cairn.storage.records import Record
from cairn.tasks.durable.versions import weight_version_after
from cairn.tasks.evaluation.evaluate import eval_due, eval_shard, initial_eval_due

# Scores of a run: its evaluations by benchmark, and the mean reward of generated samples.


class Scores(Record):
    """A benchmark's first and last score, in which failed samples count as wrong; None where there are none yet."""

    first: float | None
    last: float | None
    first_graded: float | None = None
    """Mean reward of the samples that were graded."""
    last_graded: float | None = None
    first_failed: int = 0
    """Number of samples that could not be generated or graded."""
    last_failed: int = 0


def evaluations(ledger: Ledger) -> Iterator[tuple[int, int]]:
    """Yield (iteration, weight version) of every evaluation of a run; the first iteration also has that of the initial
    weights."""
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


def scored(
    ledger: Ledger, benchmark: BenchmarkConfig, places: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int, Mapping[str, float]]]:
    """Yield (iteration, weight version, metrics) of a benchmark's committed evaluations. `places`: those to look for,
    see `evaluations`. Needs one request for each."""
    for iteration, version in places:
        commit = ledger.find(iteration, Step.EVAL, eval_shard(benchmark, version))
        if commit is not None:
            yield iteration, version, commit.metrics


def benchmark_scores(ledger: Ledger, config: RunConfig) -> dict[str, dict[int, float]]:
    """Return every score of every benchmark, by the number of iterations that the weights were trained for. Where
    samples failed, the mean over the others is stored under `<benchmark>, graded`."""
    last = ledger.last_iteration()
    if last is None:
        return {}
    scores: dict[str, dict[int, float]] = {benchmark.name: {} for benchmark in config.eval.benchmarks}
    places = [place for place in evaluations(ledger) if place[0] <= last]
    for benchmark in config.eval.benchmarks:
        name = benchmark.name
        for iteration, version, metrics in scored(ledger, benchmark, places):
            if name in metrics:
                trained = iteration + 1 if version else 0
                scores[name][trained] = metrics[name]
                graded = graded_score(metrics, name)
                if graded is not None and metrics.get(f"{name}-failed_samples"):
                    scores.setdefault(f"{name}, graded", {})[trained] = graded
    return scores


def first_and_last_scores(ledger: Ledger, config: RunConfig, last: int | None) -> dict[str, Scores]:
    """Return the first and the newest score of every benchmark; read no others."""
    places = [place for place in evaluations(ledger) if last is not None and place[0] <= last]

    def scores(benchmark: BenchmarkConfig) -> Scores:
        name = benchmark.name
        nothing: tuple[int, int, Mapping[str, float]] = (0, 0, {})
        first = next(scored(ledger, benchmark, places[:1]), nothing)[2]
        last = next(scored(ledger, benchmark, places[::-1]), nothing)[2]
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
    """Return the mean reward of all samples that an iteration generated, from its advantage step's commit.

    Falls back to the mean of the trained samples where the filter step did not record it; None where nothing is graded.
    Needs one request.
    """
    shard = next(name.partition("/filter.")[2] for name in trained.inputs if "/filter." in name)
    selection = ledger.find(trained.iteration, Step.FILTER, shard)
    metrics = trained.metrics if selection is None else {**trained.metrics, **selection.metrics}
    return metrics.get("raw_reward")


def graded_score(metrics: Mapping[str, float], benchmark: str) -> float | None:
    """Return the mean over the samples that were graded. `metrics`: an evaluation's, under the names in its commit."""
    return metrics.get(f"{benchmark}-graded", metrics.get(benchmark))


_ROLLOUT = [
    "group_id", "sample_index", "prompt_text", "prompt_ids", "response_text", "response_ids", "label", "finish_reason"
]  # fmt: skip
_REWARD = ["group_id", "sample_index", "reward", "status", "error"]


class ImageView(Record):
    """An image of a prompt."""

    sha256: str
    """SHA-256 of its bytes, in hex."""
    height: int
    """Height in pixels after the model's preprocessing."""
    width: int


class SampleView(Record):
    """A sample with the results of later steps; None for steps that have not run."""

    number: int
    """Position among the iteration's samples, from 0."""
    group_id: int
    sample_index: int
    iteration: int
    """Iteration that generated the sample: an earlier one if it waited in the buffer."""
    shard: str | None = None
    """Shard of that iteration's rollout."""
    prompt: str
    response: str
    label: str | None
    reward: float | None
    advantage: float | None
    """Mean over the response's tokens."""
    finish_reason: str | None
    status: str | None
    disposition: Disposition | None
    reason: str | None
    """Why its group was dropped."""
    error: str | None
    prompt_tokens: int | None
    """None: the run was imported, and its traces have no tokens."""
    response_tokens: int | None
    images: tuple[ImageView, ...] = ()
    """Images of the prompt, in order."""
    episode: EpisodeView | None = None
    """Turns and calls of the sample; None for a single response to the prompt, or where they were not requested."""


def iteration_samples(ledger: Ledger, iteration: int) -> list[SampleView]:
    """Return all samples that the iteration generated or took from the buffer, by group.

    Raises LookupError if the iteration has none, Damaged if a file differs from what was committed.
    """
    commits = ledger.commits(iteration)
    rollouts = [commit for commit in commits if commit.step is Step.ROLLOUT]
    selection = newest_selection(commits)
    groups = {} if selection is None else {row["group_id"]: row for row in _read(ledger, selection).to_pylist()}
    if not rollouts and not groups:
        last = ledger.last_iteration()
        available = "it has none yet" if last is None else f"its last iteration is {last}"
        raise LookupError(f"run {ledger.run!r} has no samples of iteration {iteration}; {available}")

    places = {(commit.iteration, commit.shard) for commit in rollouts}
    places |= {(row["iteration"], row["shard"]) for row in groups.values()}
    advantages = next((_advantages(ledger, commit) for commit in commits if commit.step is Step.ADVANTAGE), {})
    views: list[SampleView] = []
    for origin, shard in sorted(places, key=lambda place: (place[0], place[1] or "")):
        generated = ledger.find(origin, Step.ROLLOUT, shard)
        graded = ledger.find(origin, Step.REWARD, shard)
        assert generated is not None
        rewards = {} if graded is None else sample_rows(_read(ledger, graded, _REWARD))
        sampled = read_recorded_table(ledger.store, generated.run, generated.table, [*_ROLLOUT, IMAGES.name])
        for key, row in sample_rows(sampled).items():
            group, grade = groups.get(row["group_id"], {}), rewards.get(key, {})
            was_continued = group and (group["iteration"], group["shard"]) != (origin, shard)
            if was_continued or not (origin == iteration or group):
                continue
            views.append(
                SampleView(
                    number=len(views),
                    group_id=key[0],
                    sample_index=key[1],
                    iteration=origin,
                    shard=shard,
                    prompt=row["prompt_text"],
                    response=row["response_text"],
                    label=row["label"],
                    reward=grade.get("reward"),
                    advantage=advantages.get(key),
                    finish_reason=row["finish_reason"],
                    status=grade.get("status"),
                    disposition=group.get("disposition"),
                    reason=group.get("reason"),
                    error=grade.get("error"),
                    prompt_tokens=_count(row["prompt_ids"]),
                    response_tokens=_count(row["response_ids"]),
                    images=tuple(ImageView(**image) for image in row.get(IMAGES.name) or ()),
                )
            )
    return views


class NewestSample(Record):
    """The sample that was committed last."""

    iteration: int
    group_id: int
    sample_index: int
    prompt: str
    response: str
    reward: float | None


def newest_sample(ledger: Ledger, iteration: int) -> NewestSample | None:
    """Return the last sample of an iteration's newest shard, None where it has none. Raises Damaged and Retired."""
    commits = ledger.commits(iteration)
    rollouts = [commit for commit in commits if commit.step is Step.ROLLOUT]
    newest = max(rollouts, key=lambda commit: commit.committed_at, default=None)
    if newest is None or not newest.tables:
        return None
    columns = ["group_id", "sample_index", "prompt_text", "response_text"]
    rows = read_recorded_table(ledger.store, newest.run, newest.table, columns)
    if not rows.num_rows:
        return None
    (row,) = rows.slice(rows.num_rows - 1).to_pylist()
    key = (row["group_id"], row["sample_index"])
    graded = next((one for one in commits if one.step is Step.REWARD and one.shard == newest.shard), None)
    grades = {} if graded is None else sample_rows(_read(ledger, graded, _REWARD), {key[0]})
    return NewestSample(
        iteration=iteration,
        group_id=key[0],
        sample_index=key[1],
        prompt=row["prompt_text"],
        response=row["response_text"],
        reward=grades.get(key, {}).get("reward"),
    )


def with_episodes(ledger: Ledger, views: Sequence[SampleView]) -> list[SampleView]:
    """Return the samples, with their episodes where they have more than a single response. Raises Damaged."""
    by_sample = episodes(ledger, {(one.group_id, one.sample_index): (one.iteration, one.shard) for one in views})
    return [one.model_copy(update={"episode": by_sample.get((one.group_id, one.sample_index))}) for one in views]


def _read(ledger: Ledger, commit: Commit, columns: list[str] | None = None) -> pa.Table:
    return read_table(ledger.store, commit.run, commit.table, columns)


def _count(ids: Sequence[int] | None) -> int | None:
    return None if ids is None else len(ids)


def _advantages(ledger: Ledger, commit: Commit) -> dict[tuple[int, int], float]:
    table = _read(ledger, commit, ["group_id", "sample_index", "advantages"])
    return {key: float(np.mean(row["advantages"])) for key, row in sample_rows(table).items() if row["advantages"]}
