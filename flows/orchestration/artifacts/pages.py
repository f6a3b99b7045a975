"""The pages as Markdown: pure functions of the ledger's contents.

Text from models and names from users are escaped: see `cairn.flows.text`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from cairn.flows.reading.costs import StepCost
from cairn.flows.reading.metrics import find_metric
from cairn.flows.text import block, code, plain, table
from cairn.flows.watching.progress import sparkline
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.snapshots import sample_rows

# Best, median and worst sample that an iteration generated.


Read = Callable[[Commit, Sequence[str]], pa.Table]
"""Function that reads columns of the table of a commit."""

_TEXT = ["group_id", "sample_index", "prompt_text", "response_text", "label", "finish_reason"]


@dataclass(frozen=True)
class Picked:
    """A sample on a page."""

    title: str
    group_id: int
    sample_index: int
    reward: float
    prompt_text: str
    response_text: str
    label: str | None
    finish_reason: str


def picked_samples(commits: Sequence[Commit], read: Read) -> list[Picked]:
    """Return the samples with the best, median and worst reward that an iteration itself generated, each once.

    Returns none where none was graded. Among equal rewards, the earlier group wins. Reads the rewards of all samples
    and the texts of three.
    """
    rollouts = {commit.shard: commit for commit in commits if commit.step is Step.ROLLOUT}
    graded = [commit for commit in commits if commit.step is Step.REWARD and commit.shard in rollouts]
    columns = ["group_id", "sample_index", "reward"]
    rows = []
    for commit in graded:
        table = read(commit, columns).drop_null()
        groups, indices, rewards = (table.column(name).to_pylist() for name in columns)
        rows += [
            (-reward, group, index, commit.shard) for reward, group, index in zip(rewards, groups, indices, strict=True)
        ]
    rows.sort(key=lambda row: row[:3])
    places = {"Best": 0, "Median": len(rows) // 2, "Worst": len(rows) - 1} if rows else {}
    found, seen = [], set()
    for title, place in places.items():
        negative, group, index, shard = rows[place]
        if place in seen:
            continue
        seen.add(place)
        row = sample_rows(read(rollouts[shard], _TEXT), {group})[group, index]
        found.append(Picked(title=title, reward=-negative, **row))
    return found


PROMPT_CHARACTERS = 1500
RESPONSE_CHARACTERS = 3000
FILES = 40
"""Number of an iteration's files that its page lists at most."""
POINTS = 60
"""Number of points of the reward curve at most; more iterations are averaged."""


@dataclass(frozen=True)
class IterationFacts:
    """Contents of the page of an iteration."""

    run: str
    store: str
    iteration: int
    total: int
    """Number of iterations of the run."""
    commits: Sequence[Commit]
    metrics: Mapping[str, float]
    seconds: Mapping[Step, float]
    samples: Sequence[Picked] | None
    """Samples to show; None where they are no longer retained."""


@dataclass(frozen=True)
class RunFacts:
    """Contents of the page of a run."""

    run: str
    store: str
    done: int
    """Number of complete iterations."""
    total: int
    weight_version: int
    state_digest: str | None
    rewards: Mapping[int, float]
    """Mean reward of the generated samples, by iteration."""
    scores: Mapping[str, Mapping[int, float]]
    """Scores of each benchmark, by the number of iterations that the weights were trained for."""
    costs: Sequence[StepCost] = ()
    """Costs of this driver's iterations, by step."""


def iteration_page(facts: IterationFacts) -> str:
    """Return a page with metrics, samples and files of one iteration."""
    reward = facts.metrics.get("rollout/raw_reward")
    parts = [
        f"# {code(facts.run)}, iteration {facts.iteration} of {facts.total}",
        " · ".join(
            [
                *([f"reward **{reward:.4f}**"] if reward is not None else []),
                f"{facts.metrics['perf/step_time']:.2f} s",
                *(f"{step} {seconds:.2f} s" for step, seconds in facts.seconds.items()),
            ]
        ),
        "## Samples",
        *_samples(facts.samples),
        "## Metrics",
        table(["metric", "value", "unit"], [_metric(name, value) for name, value in sorted(facts.metrics.items())]),
        "## Snapshots",
        _files(facts),
        "More:",
        block(
            f"cairn show {facts.run} {facts.iteration} --store {facts.store}\n"
            f"cairn export {facts.run}@{facts.iteration} FOLDER --store {facts.store}",
            RESPONSE_CHARACTERS,
        ),
    ]
    return "\n\n".join(parts) + "\n"


def run_page(facts: RunFacts) -> str:
    """Return a page with rewards, evaluations and times of a run."""
    parts = [
        f"# {code(facts.run)}",
        f"{facts.done} of {facts.total} iterations, weight version {facts.weight_version}, state "
        f"{code(facts.state_digest or 'of the initial weights')}, in {code(facts.store)}.",
        "## Reward",
        *_rewards(facts.rewards),
        "## Evaluation",
        _scores(facts.scores),
    ]
    if facts.costs:
        rows = [
            [
                str(cost.step),
                f"{cost.commits:,}",
                f"{cost.seconds:,.1f}",
                f"{cost.device_seconds:,.1f}",
                "" if cost.tokens is None else f"{cost.tokens:,}",
            ]
            for cost in facts.costs
        ]
        parts += [
            "## Cost of this driver's iterations",
            table(["step", "commits", "seconds", "device-seconds", "tokens"], rows),
            "For the whole run, with idle and wasted time:",
            block(f"cairn costs {facts.run} --store {facts.store}", RESPONSE_CHARACTERS),
        ]
    return "\n\n".join(parts) + "\n"


def _samples(samples: Sequence[Picked] | None) -> list[str]:
    if samples is None:
        return ["The run no longer stores them."]
    if not samples:
        return ["None could be graded."]
    parts = []
    for sample in samples:
        about = f"group {sample.group_id}, sample {sample.sample_index}, ended by {plain(sample.finish_reason)}"
        label = "" if sample.label is None else f", label {code(sample.label[:200])}"
        parts += [
            f"### {sample.title}: reward {sample.reward:.4g}",
            f"{about}{label}. Prompt:",
            block(sample.prompt_text, PROMPT_CHARACTERS),
            "Response:",
            block(sample.response_text, RESPONSE_CHARACTERS),
        ]
    return parts


def _metric(name: str, value: float) -> list[str]:
    known = find_metric(name)
    return [code(name), _number(value), plain(known.unit) if known else ""]


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def _files(facts: IterationFacts) -> str:
    files = [(commit, output) for commit in facts.commits for output in commit.outputs]
    root = facts.store.rstrip("/")
    rows = [
        [code(commit.name), code(f"{root}/{layout.in_run(commit.run, output.path)}"), f"{output.bytes:,}"]
        for commit, output in files[:FILES]
    ]
    rest = len(files) - FILES
    return table(["commit", "file", "bytes"], rows) + (f"\n\n… and {rest:,} files more" if rest > 0 else "")


def _rewards(rewards: Mapping[int, float]) -> list[str]:
    if not rewards:
        return ["No iteration is done yet."]
    points = _averaged(rewards)
    values = list(points.values())
    first, last = min(rewards), max(rewards)
    curve = f"{sparkline(values)}  {rewards[first]:.3f} → {rewards[last]:.3f}"
    step = max(1, len(points) // 12)
    shown = [*list(points.items())[::step]]
    rows = [[name, f"{value:.4f}"] for name, value in shown]
    return [block(curve, 1000), table(["iterations", "mean reward"], rows)]


def _averaged(rewards: Mapping[int, float]) -> dict[str, float]:
    """Return at most POINTS means over consecutive iterations, by the label of these iterations."""
    order = sorted(rewards)
    width = -(-len(order) // POINTS)
    points = {}
    for start in range(0, len(order), width):
        part = order[start : start + width]
        name = str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}"
        points[name] = sum(rewards[index] for index in part) / len(part)
    return points


def _scores(scores: Mapping[str, Mapping[int, float]]) -> str:
    scored = {name: by_place for name, by_place in scores.items() if by_place}
    if not scored:
        return "Nothing has been evaluated yet."
    places = sorted({place for by_place in scored.values() for place in by_place})[-20:]
    rows = [
        [str(place), *(f"{by_place[place]:.4f}" if place in by_place else "–" for by_place in scored.values())]
        for place in places
    ]
    return table(["after iterations", *map(code, scored)], rows)
