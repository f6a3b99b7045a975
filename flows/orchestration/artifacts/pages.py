"""The pages as Markdown: pure functions of the ledger's contents.

Text from models and names from users are escaped: see `cairn.flows.text`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import pyarrow as pa

from cairn.configs.schema.run import RunConfig
from cairn.flows.orchestration.artifacts.picture import picture
from cairn.flows.reading.costs import StepCost
from cairn.flows.reading.metrics import find_metric, iteration_metrics, step_seconds
from cairn.flows.text import block, code, plain, size, table
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.snapshots import sample_rows
from cairn.tasks.durable.versions import version_of

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
    picked, seen = [], set()
    for title, place in places.items():
        negative, group, index, shard = rows[place]
        if place in seen:
            continue
        seen.add(place)
        row = sample_rows(read(rollouts[shard], _TEXT), {group})[group, index]
        picked.append(Picked(title=title, reward=-negative, **row))
    return picked


LINK = "CAIRN_BOARD"
"""Environment variable with the address of the board, to which pages link."""
PROMPT_CHARACTERS = 1500
RESPONSE_CHARACTERS = 3000
FILES = 40
"""Number of an iteration's files that its page lists at most."""
POINTS = 60
"""Number of points of the reward curve at most; more iterations are averaged."""


def curve(rewards: Mapping[int, float], scores: Mapping[str, Mapping[int, float]]) -> str:
    """Return Markdown of a picture; an empty string where there is nothing to draw.

    Args:
        rewards: mean reward of the generated samples, by iteration.
        scores: scores of each benchmark, by the number of iterations that the weights were trained for.
    """
    return picture({"reward": _averaged(rewards), **scores})


def iteration_page(
    ledger: Ledger, config: RunConfig, commits: Sequence[Commit], samples: Sequence[Picked] | None
) -> str:
    """Return a page with metrics, samples and files of one iteration. `samples`: None where they are no longer
    retained."""
    run, store, index = ledger.run, ledger.store.url, commits[0].iteration
    metrics = iteration_metrics(commits, config)
    reward = metrics.get("rollout/raw_reward")
    parts = [
        f"# {code(run)}, iteration {index} of {config.rollout.num_rollout}",
        *board_link(run),
        " · ".join(
            [
                *([f"reward **{reward:.4f}**"] if reward is not None else []),
                f"{metrics['perf/step_time']:.2f} s",
                *(f"{step} {seconds:.2f} s" for step, seconds in step_seconds(commits).items()),
            ]
        ),
        "## Samples",
        *_samples(samples),
        "## Metrics",
        table(["metric", "value", "unit"], [_metric(name, value) for name, value in sorted(metrics.items())]),
        "## Snapshots",
        _files(commits, store),
        "More:",
        block(
            f"cairn show {run}@{index} --store {store}\ncairn export {run}@{index} FOLDER --store {store}",
            RESPONSE_CHARACTERS,
        ),
    ]
    return "\n\n".join(parts) + "\n"


def run_page(
    ledger: Ledger,
    config: RunConfig,
    done: int,
    newest: Commit | None,
    scores: Mapping[str, Mapping[int, float]],
    costs: Sequence[StepCost] = (),
) -> str:
    """Return a page with evaluations and times of a run. Prefect shows the description with `curve` above it.

    Args:
        done: number of complete iterations.
        newest: newest train step.
        scores: scores of each benchmark, by the number of iterations that the weights were trained for.
        costs: costs of this driver's iterations, by step.
    """
    state = "of the initial weights" if newest is None or newest.state_digest is None else newest.state_digest
    parts = [
        f"# {code(ledger.run)}",
        *board_link(ledger.run),
        f"{done} of {config.rollout.num_rollout} iterations, weight version {version_of(newest)}, state {code(state)}, "
        f"in {code(ledger.store.url)}.",
        "## Evaluation",
        _scores(scores),
    ]
    if costs:
        rows = [
            [
                str(cost.step),
                f"{cost.commits:,}",
                f"{cost.seconds:,.1f}",
                f"{cost.device_seconds:,.1f}",
                "" if cost.tokens is None else f"{cost.tokens:,}",
            ]
            for cost in costs
        ]
        parts += [
            "## Cost of this driver's iterations",
            table(["step", "commits", "seconds", "device-seconds", "tokens"], rows),
            "For the whole run, with idle and wasted time:",
            block(f"cairn costs {ledger.run} --store {ledger.store.url}", RESPONSE_CHARACTERS),
        ]
    return "\n\n".join(parts) + "\n"


def board_page(run: str | None = None) -> str | None:
    """Return the address of a run's page on the board, or of all runs; None where no board is known."""
    url = os.environ.get(LINK)
    return url and f"{url}/{f'runs/{run}' if run else ''}"


def board_link(run: str | None = None) -> list[str]:
    """Return a link to that page; nothing where no board is known."""
    page = board_page(run)
    return [f"[{'Live on the board' if run else 'All runs on the board'}]({page})"] if page else []


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


def _files(commits: Sequence[Commit], store: str) -> str:
    files = [(commit, output) for commit in commits for output in commit.outputs]
    root = store.rstrip("/")
    rows = [
        [code(commit.name), code(f"{root}/{layout.in_run(commit.run, output.path)}"), size(output.bytes)]
        for commit, output in files[:FILES]
    ]
    rest = len(files) - FILES
    return table(["commit", "file", "size"], rows) + (f"\n\n… and {rest:,} files more" if rest > 0 else "")


def _averaged(rewards: Mapping[int, float]) -> dict[float, float]:
    """Return at most POINTS means over consecutive iterations, by the middle of these iterations."""
    order = sorted(rewards)
    width = -(-len(order) // POINTS)
    parts = [order[start : start + width] for start in range(0, len(order), width or 1)]
    return {fmean(part): fmean(rewards[index] for index in part) for part in parts}


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
