"""An iteration: the DAG of steps, top to bottom, in two halves that share nothing but commits.

    collect   rollout → reward → filter                          needs filter of i-1, weights of i-1-lag
    learn     [score] → advantage → train → [checkpoint] → sync  needs train of i-1, filter of i

In an iteration without a score step, `advantage` needs only the filter step of its iteration: `estimate_ahead`.
With streaming, samples are generated all the time and `collect` takes complete groups (`cairn.flows.streaming`).
Where the data contain the responses to train on, nothing is sampled or graded: the rollout step reads the rows and the
filter step passes all of them (`cairn.tasks.generation.offline`). Demonstrations need no advantages either.

`cairn.flows.pipeline` defines which halves run concurrently.
"""

import itertools
import math
from collections.abc import Sequence
from threading import Event
from typing import Any

from cairn.flows.step_runner import Pending, StepRunner
from cairn.flows.streaming import admit_prompts, collect_from_stream
from cairn.storage.ledger.commits import Commit, Step
from cairn.tasks.advantages.step import advantage
from cairn.tasks.batch.batch import trained_shards
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.quarantine import skipped_prompts
from cairn.tasks.durable.selection import last_selection, number
from cairn.tasks.durable.step import DurableStep
from cairn.tasks.durable.versions import version_of
from cairn.tasks.evaluation.evaluate import eval_due, eval_shard, evaluate, initial_eval_due
from cairn.tasks.generation.offline import read_demonstrations, take_all
from cairn.tasks.generation.rollout import resumed_groups, rollout
from cairn.tasks.grading.reward import reward
from cairn.tasks.halves import learning_steps, weights_after
from cairn.tasks.selecting.filter import buffered_groups, filter_groups
from cairn.tasks.trainer.checkpoint import checkpoint, copies_of
from cairn.tasks.trainer.score import score
from cairn.tasks.trainer.sync import goes_on, sync
from cairn.tasks.trainer.train import train


def iteration(run: RunContext, steps: StepRunner, index: int) -> list[Commit]:
    """Execute both halves of iteration `index`, one after the other, then its evaluations.

    Returns the commits from which its metrics are computed. Steps already committed do not run.
    """
    collected, advantages = up_to_learning(run, steps, index)
    learned, saving, storing = learn(run, steps, index, advantages)
    evaluated = evaluate_after(run, steps, index)
    return [*collected, *learned, *(step.result() for step in (storing, saving) if step), *evaluated]


def up_to_learning(run: RunContext, steps: StepRunner, index: int) -> tuple[list[Commit], Commit | None]:
    """Execute everything of an iteration that does not depend on the previous update.

    Returns the commits of `admit` (with streaming) and `collect`, and the result of `estimate_ahead`.
    """
    admitted = admit(run, steps, index) if run.config.rollout.pipeline == "streaming" else []
    return [*admitted, *collect(run, steps, index)], estimate_ahead(run, steps, index)


def admit(run: RunContext, steps: StepRunner, index: int) -> list[Commit]:
    """Admit the prompts that an iteration adds to the stream. The first iteration evaluates the initial weights before
    that."""
    return [*evaluate_before(run, steps, index), admit_prompts(run, steps, index)]


def collect(run: RunContext, steps: StepRunner, index: int) -> list[Commit]:
    """Generate and select the batch of an iteration, with the weights that the lag prescribes.

    Runs rounds of rollout, reward and filter until the batch is full. The first iteration evaluates the initial weights
    before that.
    """
    config = run.config
    if not config.samples_responses:
        return collect_from_data(run, steps, index)
    if config.rollout.pipeline == "streaming":
        return collect_from_stream(run, steps, index)
    lag = config.rollout.weights_lag
    behaviour = weights_after(run, index - 1 - lag)
    previous = last_selection(run, index - 1) if index else None

    evals = evaluate_before(run, steps, index)
    generated: list[Commit] = []
    graded: list[Commit] = []
    selection: Commit | None = None
    for round in itertools.count():
        before = [commit for commit in (selection or previous,) if commit]
        shards = plan_round(run, index, selection, previous, round)
        pending = [
            steps.submit(rollout, index, shard, behaviour, before, continued_shards(run, before, part), **part)
            for shard, part in shards
        ]
        rewarded = [
            steps.submit(reward, index, shard, samples) for (shard, _), samples in zip(shards, pending, strict=True)
        ]
        generated += [samples.result() for samples in pending]
        graded += [rewards.result() for rewards in rewarded]
        selection = steps.call(filter_groups, index, f"{round:02d}", previous, generated, graded, round=round)
        if selection.values["full"]:
            break
    assert selection is not None
    return [*evals, *generated, *graded, selection]


def collect_from_data(run: RunContext, steps: StepRunner, index: int) -> list[Commit]:
    """Read the batch of an iteration from the data. The first iteration evaluates the initial weights before that."""
    evals = evaluate_before(run, steps, index)
    before = [last_selection(run, index - 1)] if index else []
    place: dict[str, Any] = {
        "cursor": number(before[0], "cursor") if before else 0,
        "without": skipped_prompts(run.ledger, index) or None,
    }
    samples = steps.call(read_demonstrations, index, "00-000", before, **place)
    selection = steps.call(take_all, index, "00", samples)
    return [*evals, samples, selection]


def estimate_ahead(run: RunContext, steps: StepRunner, index: int) -> Commit | None:
    """Estimate the advantages of the batch that `collect` selected; return None in an iteration with a score step or
    without an advantage step."""
    due = learning_steps(run.config, index)
    if Step.ADVANTAGE not in due or Step.SCORE in due:
        return None
    selection = last_selection(run, index)
    return steps.call(advantage, index, None, selection, *trained_shards(run, selection), None)


def learn(
    run: RunContext,
    steps: StepRunner,
    index: int,
    advantages: Commit | None = None,
    saving: Pending | None = None,
) -> tuple[list[Commit], Pending | None, Pending | None]:
    """Update the newest weights on the batch that `collect` selected, and publish the new weights.

    Returns the commits; the step `checkpoint` where it is due; and the step `sync` where it stores weights that nobody
    waits for. What these two write is copied, and the next update may begin. The caller waits for them.

    Args:
        advantages: the commit of `estimate_ahead`, where it has already estimated them.
        saving: the step `checkpoint` before this one, whose copy may still be written.
    """
    updated = weights_after(run, index - 1)
    selection = last_selection(run, index)
    rollouts, rewards = trained_shards(run, selection)
    due = learning_steps(run.config, index)
    if Step.CHECKPOINT in due and run.find(index + 1, Step.TRAIN) and not run.find(index, Step.CHECKPOINT):
        due.remove(Step.CHECKPOINT)  # the driver that had copied this state died: it is replayed on the way up
    scores = steps.call(score, index, None, updated, selection, rollouts) if Step.SCORE in due else None
    if Step.ADVANTAGE in due and advantages is None:
        advantages = steps.call(advantage, index, None, selection, rollouts, rewards, scores)
    trained = steps.call(train, index, None, updated, selection, rollouts, advantages, scores)
    run.unfinished.wait(before=index)  # the next version differs from it, and no checkpoint replaces its restore point
    if Step.CHECKPOINT in due:
        if saving is not None:
            _wait_until_ended(saving)  # one copy is held at a time
        saving = begin(run, steps, checkpoint, index, trained, selection)
    else:
        saving = None
    synced, storing = [], None
    if Step.SYNC in due and goes_on(run) and not eval_due(run.config, index):
        storing = begin(run, steps, sync, index, trained)
        run.unfinished.add(index, storing)
    elif Step.SYNC in due:
        synced = [steps.call(sync, index, None, trained)]
    learned = [*([scores] if scores else []), *([advantages] if advantages else []), trained, *synced]
    return learned, saving, storing


def begin(run: RunContext, steps: StepRunner, step: DurableStep[Any], index: int, *args: Commit) -> Pending:
    """Start a step that writes what it has copied. Returns once it has copied it, or ended."""
    copied = copies_of(run).expect(step.name, index)
    pending = steps.submit(step, index, None, *args)
    pending.add_done_callback(lambda _: copied.set())
    copied.wait()
    return pending


def _wait_until_ended(step: Pending) -> None:
    """Wait until a submitted step has ended. Its error, if any, is that of its own iteration."""
    over = Event()
    step.add_done_callback(lambda _: over.set())
    over.wait()


def evaluate_before(run: RunContext, steps: StepRunner, index: int) -> list[Commit]:
    """Evaluate the initial weights before the first iteration, where that is due."""
    return evaluate_all(run, steps, index, None) if index == 0 and initial_eval_due(run.config) else []


def evaluate_after(run: RunContext, steps: StepRunner, index: int) -> list[Commit]:
    """Evaluate the weights after an iteration, where evaluations are due."""
    return evaluate_all(run, steps, index, weights_after(run, index)) if eval_due(run.config, index) else []


def evaluate_all(run: RunContext, steps: StepRunner, index: int, weights: Commit | None) -> list[Commit]:
    """Run every benchmark on the weights that the commit `weights` produced; None: the initial weights."""
    version = version_of(weights)
    return [
        steps.call(evaluate, index, eval_shard(benchmark, version), weights, name=benchmark.name)
        for benchmark in run.config.eval.benchmarks
    ]


def plan_round(
    run: RunContext, index: int, selection: Commit | None, previous: Commit | None, round: int
) -> Sequence[tuple[str, dict[str, Any]]]:
    """Return the shards of a round: their names, and the groups that each generates.

    The first round generates `over_sampling_batch_size` groups, minus the groups in the buffer that are young enough to
    be trained on. A later round generates the same proportion of the missing groups. Unfinished groups are resumed
    before new prompts are drawn. With `partial_rollout` the round ends when as many groups as are missing have been
    generated.
    """
    config = run.config.rollout
    first = config.over_sampling_batch_size or config.rollout_batch_size
    if selection is not None:
        missing = number(selection, "missing")
        count = math.ceil(missing * first / config.rollout_batch_size)
    else:
        buffered = buffered_groups(run, previous, index) if previous else 0
        missing = max(0, config.rollout_batch_size - buffered)
        count = max(0, first - buffered)
    if config.partial_rollout and not missing:
        count = 0
    before = selection or previous
    resumed = min(count, number(before, "unfinished")) if before else 0
    parts = min(count, config.shards_per_round or _engines_of_round(run, index, round))
    whole = {
        "cursor": before.values["cursor"] if before else 0,
        "count": count - resumed,
        "resumed": resumed,
        "needed": missing if config.partial_rollout else None,
        "parts": parts,
        "without": skipped_prompts(run.ledger, index) or None,
    }
    return [(f"{round:02d}-{part:03d}", {**whole, "part": part}) for part in range(parts)]


def _engines_of_round(run: RunContext, index: int, round: int) -> int:
    """Return the number of engines that a round is cut for: that of its shards, if some were made before the number
    changed."""
    now = run.config.rollout.num_engines
    recorded: Any = [terms.config for terms in (run.ledger.manifest, *run.ledger.upgrades)]
    most = max(config["rollout"]["num_engines"] for config in recorded)
    if any(config["rollout"]["num_engines"] != now for config in recorded):
        for part in range(most):
            made = run.find(index, Step.ROLLOUT, f"{round:02d}-{part:03d}")
            if made is not None:
                return run.config_of(made).rollout.num_engines
    return now


def continued_shards(run: RunContext, earlier: Sequence[Commit], part: dict[str, Any]) -> list[Commit]:
    """Return the rollout commits with the unfinished groups that a shard of `plan_round` resumes, each commit once."""
    places = resumed_groups(run, earlier, resumed=part["resumed"], part=part["part"], parts=part["parts"])
    shards = dict.fromkeys((iteration, shard) for iteration, shard, _ in places)
    return [run.committed(iteration, Step.ROLLOUT, shard) for iteration, shard in shards]
