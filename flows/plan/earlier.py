"""Measured step times of earlier runs of the same model in the same layout: more accurate than a machine's rates."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.configs.errors import ConfigError
from cairn.configs.loader import from_manifest
from cairn.configs.schema.run import RunConfig
from cairn.engines.plan.peaks import PEAK_TFLOPS
from cairn.flows.plan.subject import StepTime, Subject
from cairn.flows.reading.costs import tokens
from cairn.flows.reading.metrics import busy_seconds
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import list_runs, read_manifest
from cairn.storage.store.errors import BeingDeleted, Damaged, StoreError
from cairn.storage.store.store import Store

ITERATIONS = 5
"""Number of newest complete iterations from which times are taken. Iteration 0 is left out where there are others,
because engines warm up in it."""

TIMED = (Step.ROLLOUT, Step.REWARD, Step.SCORE, Step.TRAIN, Step.CHECKPOINT, Step.SYNC)
_COUNTED = {Step.ROLLOUT: "responses", Step.REWARD: "responses", Step.SCORE: "sequences", Step.TRAIN: "sequences"}
"""Steps whose time grows with tokens, and the field of `Earlier` with those tokens."""

_ROLLOUT = ("engine", "num_engines", "num_gpus_per_engine", "num_threads", "dtype", "sglang")
_TRAINING = (
    "engine",
    "world_size",
    "num_gpus_per_rank",
    "num_threads",
    "dtype",
    "megatron",
    "gradient_checkpointing",
    "lora",
)


@dataclass(frozen=True)
class Earlier:
    """A run, and the times and tokens of its iterations."""

    run: str
    seconds: dict[str, float]
    """Seconds of each step, averaged over the iterations that have it."""
    responses: float
    """Mean number of generated tokens in an iteration."""
    sequences: float
    """Mean number of tokens that an iteration trained on, prompts included."""
    response: float
    """Mean number of tokens of a response."""
    sequence: float
    """Mean number of tokens of a trained sample."""

    def scaled(self, subject: Subject) -> list[StepTime]:
        """Return the step times, scaled to the tokens of a recipe."""
        config, lengths = subject.config, subject.lengths
        prompts = config.rollout.over_sampling_batch_size or config.rollout.rollout_batch_size
        planned = {
            "responses": prompts * config.group_size * lengths.response,
            "sequences": config.samples_per_rollout * lengths.mean,
        }
        interval = config.checkpoint.save_interval or config.rollout.num_rollout or 1
        found = []
        for name, seconds in self.seconds.items():
            counted = _COUNTED.get(Step(name))
            times = 1.0 if counted is None else planned[counted] / getattr(self, counted)
            times /= interval if name == Step.CHECKPOINT else 1
            found.append(StepTime(step=name, seconds=seconds * times, source=f"run {self.run}"))
        return found


def earlier_run(store: Store, config: RunConfig, gpu: str | None, like: str | None) -> Earlier | None:
    """Return the measurements of the newest run in the store with the model, engines and layout of a configuration;
    None without one that has a complete iteration.

    Args:
        gpu: device name that the GPUs report; None where there are none.
        like: name of a run to use instead, whatever its model and layout.

    Raises FileNotFoundError where there is no run of that name.
    """
    if like is not None:
        return _measured(Ledger.open(store, like))
    found = []
    for name in list_runs(store):
        try:
            manifest = read_manifest(store, name)
            if _is_alike(from_manifest(manifest.config), config):
                found.append((manifest.created_at, name))
        except (
            FileNotFoundError,
            BeingDeleted,
            Damaged,
            StoreError,
            ConfigError,
        ):  # gone, or not to be read
            continue
    for _, name in sorted(found, reverse=True):
        ledger = Ledger.open(store, name)
        if _ran_on(ledger, gpu) and (measured := _measured(ledger)) is not None:
            return measured
    return None


def _is_alike(one: RunConfig, other: RunConfig) -> bool:
    def of(config: RunConfig) -> tuple[Any, ...]:
        rollout = [getattr(config.rollout, name) for name in _ROLLOUT]
        training = [getattr(config.training, name) for name in _TRAINING]
        algorithm = config.algorithm
        return (
            Path(config.model.path).name,
            rollout,
            training,
            algorithm.learns_from,
            algorithm.advantage_estimator == "ppo",
            config.fleet.colocate,
        )

    return of(one) == of(other)


def _ran_on(ledger: Ledger, gpu: str | None) -> bool:
    """Whether the newest iteration was trained on a GPU of this name, or on a CPU."""
    last = ledger.last_iteration()
    devices = {} if last is None else {c.environment.device for c in ledger.commits(last) if c.step is Step.TRAIN}
    if gpu is None:
        return not any(name in device for name, _ in PEAK_TFLOPS for device in devices)
    return any(gpu in device for device in devices)


def _measured(ledger: Ledger) -> Earlier | None:
    last = ledger.last_iteration()
    if last is None:
        return None
    iterations: list[Sequence[Commit]] = []
    for number in range(last, -1, -1):
        commits = ledger.commits(number)
        if any(commit.step is Step.TRAIN for commit in commits) and not (number == 0 and iterations):
            iterations.append(commits)
        if len(iterations) == ITERATIONS:
            break
    if not iterations:
        return None
    seconds: dict[str, float] = {}
    for step in TIMED:
        of_step = [own for commits in iterations if (own := [c for c in commits if c.step is step])]
        if of_step:
            seconds[step] = sum(map(busy_seconds, of_step)) / len(of_step)
    every = [commit for commits in iterations for commit in commits]
    rollouts = [commit for commit in every if commit.step is Step.ROLLOUT]
    trains = [commit for commit in every if commit.step is Step.TRAIN]
    generated, trained = (sum(tokens(commit) or 0 for commit in own) for own in (rollouts, trains))
    samples = sum(int(commit.metrics.get("samples", 0)) for commit in rollouts)
    config = from_manifest(ledger.manifest.config)
    sequence = trained / (len(trains) * config.samples_per_rollout)
    return Earlier(
        ledger.run,
        seconds,
        generated / len(iterations) or 1.0,
        trained / len(iterations) or 1.0,
        generated / samples if samples else sequence,
        sequence,
    )
