"""Speed of the three pipelines on other machines, and the load of their driver: a discrete-event simulation with
published or measured rates.

    python -m bench.pipeline_sim [--measured FILE] [--seed 0] [--smoke] [--json FILE]

Without a file: 8, 64 and 1,024 GPUs, half of them for rollouts, 512 prompts of 16 responses an iteration. The driver's
load is that which `bench.driver_load` measured (bench/clusters.py). Rates are those of Qwen2.5-Math-7B on H20:

    decoding       a step reads the weights (15.2 GB) and the caches (57 kB a token) at 4 TB/s, plus 1 ms
    lengths        log-normal, the 99th percentile ten times the median (Laminar, arXiv 2510.12633), cut at 28 k tokens;
                   the median is the one with which 64 GPUs generate for 151 s without overlap, as verl measured
    training       157 s a batch on 32 GPUs, as verl measured (its docs/advance/fully_async.md, table of 7B), in
                   proportion to tokens and GPUs
    new weights    2 s (NeMo-RL 0.7 to 1.5 s for 30B, verl 2.5 to 3 s for 27B)

With the results of `python -m bench.pipeline --json FILE`: rates come from its `sync` runs alone, by least squares over
their iterations, and the predictions are compared with the other runs.

The model. An engine decodes all of its samples in step; a step takes `step` seconds, plus `step_each` for every sample.
A prefill stalls the engine: of a prompt, or of the prefixes of interrupted samples under new weights. The trainer
consumes a batch as it was cut. An iteration has `fixed` seconds in which neither side works, half of them before its
batch is cut and half before it is trained; on two cores this work slows down both sides. Evaluations are left out. The
rules are those of docs/iteration.md:

    sync          prompts of iteration i are admitted when i - 1 is learned
    lagged        when i - 2 is learned and the batch before is complete
    streaming S   when i - 1 - S is learned, and learning waited for one of its last three batches while engines have
                  less than a batch to work on and less than a batch waits, or nothing else is left for the next batch;
                  a batch first takes groups that would be too old for the next one, then the earliest complete ones
"""

import argparse
import heapq
import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.command import parse, say

Lengths = Callable[[np.random.Generator, int], np.ndarray]
"""Function that draws the response lengths of a group, in tokens."""


@dataclass(frozen=True)
class Machine:
    """Machine and workload of a run."""

    engines: int
    """Number of rollout engines; they do not train."""
    groups: int
    """Number of prompts of an iteration."""
    group_size: int
    lengths: Lengths
    prompt_tokens: float
    step: float
    """Seconds of a decoding step."""
    step_each: float
    """Additional seconds of a decoding step for each sample in it."""
    prefill_rate: float
    """Tokens per second of an engine's prefill."""
    train_fixed: float
    """Constant seconds of an update."""
    train_rate: float
    """Response tokens per second of an update."""
    update: float
    """Seconds to publish new weights, in which nothing is trained."""
    fixed: float = 0.0
    """Seconds of an iteration in which neither side works."""
    slots: int = 1024
    """Number of samples that an engine decodes concurrently; others wait."""
    cores: int | None = None
    """Number of cores of the whole machine, where one engine, the trainer and the work of `fixed` seconds share them;
    None: each side has its own."""

    def slowed(self, by: float) -> "Machine":
        """Return a machine on which both sides take `by` times as long."""
        return replace(
            self,
            step=self.step * by,
            step_each=self.step_each * by,
            prefill_rate=self.prefill_rate / by,
            train_fixed=self.train_fixed * by,
            train_rate=self.train_rate / by,
            update=self.update * by,
        )


@dataclass(frozen=True)
class Pipeline:
    """Lag in publications: 0 is `sync`, 1 `lagged`. With `max_age` the pipeline is `streaming`."""

    lag: int = 0
    max_age: int | None = None


PIPELINES = {
    "sync": Pipeline(),
    "lagged": Pipeline(lag=1),
    **{f"streaming {age}": Pipeline(max_age=age) for age in (1, 2, 4)},
}


@dataclass(frozen=True)
class Prediction:
    """Predicted figures of a run without evaluations."""

    seconds: float
    """Mean seconds of an iteration."""
    tokens_per_second: float
    rollout_idle: float
    """Share of the time in which an engine does not work, averaged over engines."""
    train_idle: float


@dataclass(eq=False)
class _Group:
    iteration: int
    """Iteration that admitted it."""
    left: int
    """Number of unfinished samples."""
    tokens: int = 0
    oldest: int | None = None
    """Version of the weights that sampled its first token; None before."""


@dataclass
class _Engine:
    machine: Machine
    queue: deque[tuple[int, _Group]] = field(default_factory=deque)
    """Length and group of each waiting sample."""
    open: list[tuple[float, int, float, _Group]] = field(default_factory=list)
    """Heap of (step at which a sample ends, counter, step at which it began, group)."""
    now: float = 0.0
    steps: float = 0.0
    stalled: float = 0.0
    """Seconds of stall that are left."""
    busy: float = 0.0
    begun: int = 0

    def advance(self, to: float) -> None:
        """Simulate the engine until `to`."""
        seconds, self.now = to - self.now, to
        if not self.open and not self.stalled:
            return
        waiting = min(seconds, self.stalled)
        self.stalled -= waiting
        self.busy += waiting
        if self.open:
            self.busy += seconds - waiting
            self.steps += (seconds - waiting) / self._step()

    def fill(self, version: int) -> None:
        """Start waiting samples while there are free slots."""
        while self.queue and len(self.open) < self.machine.slots:
            length, group = self.queue.popleft()
            self.begun += 1
            heapq.heappush(self.open, (self.steps + length, self.begun, self.steps, group))
            self.stalled += self.machine.prompt_tokens / self.machine.prefill_rate
            group.oldest = version if group.oldest is None else group.oldest

    def take_weights(self) -> None:
        """Load new weights and prefill all running samples again."""
        if self.open:
            tokens = sum(self.steps - began + self.machine.prompt_tokens for _, _, began, _ in self.open)
            self.stalled += self.machine.update + tokens / self.machine.prefill_rate

    def next_end(self) -> float:
        """Return when the next sample ends in the current state."""
        if not self.open:
            return math.inf
        return self.now + self.stalled + max(0.0, self.open[0][0] - self.steps) * self._step()

    def _step(self) -> float:
        return self.machine.step + self.machine.step_each * len(self.open)


def simulate(machine: Machine, pipeline: Pipeline, iterations: int, seed: int = 0) -> Prediction:
    """Simulate `iterations` iterations, from the start to the last update's end."""
    found = _simulate(machine, pipeline, iterations, seed)
    if machine.cores is None or pipeline == Pipeline():
        return found
    for _ in range(_ROUNDS):
        left = machine.cores - machine.fixed / found.seconds
        found = _simulate(machine.slowed(max(1.0, 2 / left)), pipeline, iterations, seed)
    return found


_ROUNDS = 6
"""Number of simulations until the length of an iteration converges; the cores left for both sides depend on it."""


def _simulate(machine: Machine, pipeline: Pipeline, iterations: int, seed: int) -> Prediction:
    run = _Run(machine, pipeline, iterations, np.random.default_rng(seed))
    while run.learned < iterations:
        run.next_event()
    return Prediction(
        run.now / iterations,
        run.tokens / run.now,
        1 - statistics.fmean(engine.busy for engine in run.engines) / run.now,
        1 - run.trained / run.now,
    )


class _Run:
    def __init__(self, machine: Machine, pipeline: Pipeline, iterations: int, chance: np.random.Generator) -> None:
        self.machine, self.pipeline, self.iterations, self.chance = machine, pipeline, iterations, chance
        self.engines = [_Engine(machine) for _ in range(machine.engines)]
        self.now = self.trained = 0.0
        self.admitted = self.cut = self.learned = self.tokens = 0
        self.open: list[_Group] = []
        self.complete: list[_Group] = []
        self.batches: deque[tuple[float, int]] = deque()
        """Time at which each batch is ready for training, and its tokens."""
        self.learning: float | None = None
        """End of the current update."""
        self.free_since = 0.0
        """End of the previous update."""
        self.waited = deque[bool](maxlen=3)
        """Whether each of the last batches was ready only after the previous update."""
        self.ends: list[tuple[float, int, int]] = []
        """Heap of (end of an engine's next sample, value of the engine's change counter at that estimate, engine
        number)."""
        self.changes = [0] * machine.engines
        self._progress()

    def next_event(self) -> None:
        """Advance to the next event."""
        while self.ends and self.ends[0][1] != self.changes[self.ends[0][2]]:
            heapq.heappop(self.ends)
        ending = self.ends[0][0] if self.ends else math.inf
        waiting = self.learning if self.learning is not None else self.batches[0][0] if self.batches else math.inf
        self.now = max(self.now, min(ending, waiting))
        if math.isinf(self.now):
            raise RuntimeError("the pipeline waits for itself")
        if ending <= waiting:
            if not self._end_samples(self.ends[0][2]):
                return
        elif self.learning is not None:
            self.learning = None
            self.learned += 1
            self.free_since = self.now
            if self.pipeline.max_age is not None:
                for number, engine in enumerate(self.engines):
                    engine.advance(self.now)
                    engine.take_weights()
                    self._changed(number)
        self._progress()

    def _end_samples(self, number: int) -> bool:
        """End the due samples of an engine; return whether that completes a group."""
        complete = len(self.complete)
        engine = self.engines[number]
        engine.advance(self.now)
        while engine.open and engine.open[0][0] <= engine.steps + 1e-6:
            _, _, _, group = heapq.heappop(engine.open)
            group.left -= 1
            if not group.left:
                self.open.remove(group)
                self.complete.append(group)
        engine.fill(self.learned)
        self._changed(number)
        return len(self.complete) > complete

    def _changed(self, number: int) -> None:
        self.changes[number] += 1
        end = self.engines[number].next_end()
        if not math.isinf(end):
            heapq.heappush(self.ends, (end, self.changes[number], number))

    def _progress(self) -> None:
        moved = True
        while moved:
            moved = False
            if self.admitted < self.iterations and self._may_admit(self.admitted):
                self._admit()
                moved = True
            if self.cut < self.admitted and self._cut():
                moved = True
            if self.learning is None and self.batches and self.batches[0][0] <= self.now:
                self._learn()
                moved = True

    def _learn(self) -> None:
        ready, tokens = self.batches.popleft()
        if self.learned:  # the first is waited for in any case
            self.waited.append(ready >= self.free_since)
        seconds = self.machine.train_fixed + tokens / self.machine.train_rate + self.machine.update
        self.trained += seconds
        self.learning = self.now + seconds
        self.tokens += tokens

    def _may_admit(self, iteration: int) -> bool:
        if self.pipeline.max_age is not None:
            return self.learned >= iteration - self.pipeline.max_age and self._wants_more()
        return self.learned >= iteration - self.pipeline.lag and self.cut >= iteration

    def _wants_more(self) -> bool:
        """Whether more prompts are admitted; the same rule as `cairn.tasks.streaming.stream.Pacing`."""
        batch = self.machine.groups
        waiting = len(self.batches) * batch + len(self.complete)
        if waiting + len(self.open) < batch:
            return True
        is_ahead = bool(self.waited) and not any(self.waited)
        return not is_ahead and len(self.open) < batch and waiting < batch

    def _admit(self) -> None:
        for _ in range(self.machine.groups):
            lengths = self.machine.lengths(self.chance, self.machine.group_size)
            group = _Group(self.admitted, len(lengths), int(lengths.sum()))
            self.open.append(group)
            engine = min(self.engines, key=lambda engine: len(engine.open) + len(engine.queue))
            engine.advance(self.now)
            engine.queue.extend((int(length), group) for length in lengths)
            engine.fill(self.learned)
        for number in range(len(self.engines)):
            self._changed(number)
        self.admitted += 1

    def _cut(self) -> bool:
        age = self.pipeline.max_age
        if age is None:
            due, chosen = [g for g in self.open if g.iteration == self.cut], self.complete
        else:
            # Groups that would be more than `age` publications old in batch i + 1 must be in batch i.
            def is_due(group: _Group) -> bool:
                return group.oldest is not None and self.cut + 1 - group.oldest > age

            due = [group for group in self.open if is_due(group)]
            chosen = sorted(self.complete, key=lambda group: not is_due(group))
        if due or len(chosen) < self.machine.groups:
            return False
        chosen = chosen[: self.machine.groups]
        taken = set(chosen)
        self.complete = [group for group in self.complete if group not in taken]
        self.batches.append((self.now + self.machine.fixed, sum(group.tokens for group in chosen)))
        self.cut += 1
        return True


def log_normal(median: float, sigma: float, longest: int) -> Lengths:
    """Return a distribution with lengths from one token to `longest`."""

    def draw(chance: np.random.Generator, count: int) -> np.ndarray:
        return np.clip(np.rint(chance.lognormal(math.log(median), sigma, count)), 1, longest)

    return draw


TAIL = math.log(10) / 2.326
"""Sigma of a log-normal distribution whose 99th percentile is ten times its median."""

MEDIAN_LENGTH, LONGEST = 1400, 28_000
H20_BYTES = 4e12
"""Memory bandwidth of H20 in bytes per second."""
WEIGHTS, CACHE = 15.2e9, 57_344
"""Bytes of the 7B model in bfloat16, and of a token's keys and values: 28 layers, 4 heads of 128."""


def gpus(rollout: int, training: int) -> Machine:
    """Return a machine with the published rates and these numbers of GPUs, one engine on each rollout GPU."""
    lengths = log_normal(MEDIAN_LENGTH, TAIL, LONGEST)
    mean = float(lengths(np.random.default_rng(0), 100_000).mean())
    batch = 512 * 16 * mean
    return Machine(
        engines=rollout,
        groups=512,
        group_size=16,
        lengths=lengths,
        prompt_tokens=200,
        step=0.001 + WEIGHTS / H20_BYTES,
        step_each=CACHE * mean / H20_BYTES,
        prefill_rate=148e12 * 0.5 / 15.2e9,
        train_fixed=0.0,
        train_rate=batch / 157 * training / 32,
        update=2.0,
    )


def calibrated(rows: dict[str, list[dict[str, Any]]]) -> Machine:
    """Return the machine of these `sync` runs, by least squares over their iterations: rollouts on steps and tokens,
    updates on a constant and tokens."""
    iterations = [iteration for run in rows["sync"] for iteration in run["iterations"]]
    lengths = [np.asarray(iteration["response_lengths"]) for iteration in iterations]
    tokens = np.array([own.sum() for own in lengths], float)
    longest = np.array([own.max() for own in lengths], float)
    step, step_each = _least_squares([longest, tokens], [i["rollout_seconds"] for i in iterations])
    constant, each = _least_squares([np.ones_like(tokens), tokens], [i["train_seconds"] for i in iterations])
    per = {name: sum(run[name] for run in rows["sync"]) / len(iterations) for name in ("seconds", "sync_seconds")}
    working = statistics.fmean(i["rollout_seconds"] + i["train_seconds"] for i in iterations)
    groups = [own.reshape(-1, rows["sync"][0]["group_size"]) for own in lengths]
    pool = np.concatenate(groups)

    def draw(chance: np.random.Generator, count: int) -> np.ndarray:
        return np.asarray(pool[chance.integers(len(pool))][:count])

    return Machine(
        engines=1,
        groups=len(groups[0]),
        group_size=groups[0].shape[1],
        lengths=draw,
        prompt_tokens=0,  # in the rates of rollouts
        step=step,
        step_each=step_each,
        prefill_rate=1 / max(each, 1e-12) * 3,  # a forward pass is a third of an update
        train_fixed=max(0.0, constant - per["sync_seconds"]),
        train_rate=1 / max(each, 1e-12),
        update=per["sync_seconds"],
        fixed=max(0.0, per["seconds"] - working),
        cores=2,
    )


def _least_squares(columns: Sequence[np.ndarray], wanted: Sequence[float]) -> tuple[float, ...]:
    """Return nonnegative least-squares coefficients: a column whose coefficient would be negative is left out."""
    matrix, target = np.stack(columns, 1), np.asarray(wanted, float)
    found = np.linalg.lstsq(matrix, target, rcond=None)[0]
    if (found < 0).any():
        best = int(np.argmax(found))
        found = np.zeros(len(columns))
        found[best] = matrix[:, best] @ target / (matrix[:, best] @ matrix[:, best])
    return tuple(float(value) for value in found)


def predictions(machine: Machine, iterations: int, seed: int) -> dict[str, Prediction]:
    """Return the prediction for every pipeline."""
    return {name: simulate(machine, pipeline, iterations, seed) for name, pipeline in PIPELINES.items()}


def _shown(title: str, found: dict[str, Prediction]) -> Table:
    table = Table("", "s an iteration", "times sync", "tokens/s", "rollout idle", "trainer idle", title=title)
    for name, one in found.items():
        faster = one.tokens_per_second / found["sync"].tokens_per_second
        shares = f"{one.rollout_idle:.2f}", f"{one.train_idle:.2f}"
        table.add_row(name, f"{one.seconds:.2f}", f"{faster:.2f}", f"{one.tokens_per_second:,.0f}", *shares)
    return table


def compare(rows: dict[str, list[dict[str, Any]]], seed: int) -> tuple[Table, dict[str, dict[str, float]]]:
    """Return the predictions for the machine of these runs, next to the measurements there."""
    if "sync" not in rows:
        raise SystemExit(
            "there is no run of sync to take rates from: measure with `python -m bench.pipeline --modes sync …`"
        )
    machine = calibrated(rows)
    table = Table("", "predicted s", "measured s", "off by", "rollout idle", "measured", "trainer idle", "measured")
    found = {}
    for name, pipeline in PIPELINES.items():
        if name not in rows:
            continue
        runs, count = rows[name], len(rows[name][0]["ends"])
        one = simulate(machine, pipeline, count, seed)
        seconds = statistics.median(run["seconds"] for run in runs) / count
        rollout, train = (
            statistics.median(1 - run[side] / run["seconds"] for run in runs)
            for side in ("rollout_seconds", "train_seconds")
        )
        off = one.seconds / seconds - 1
        found[name] = asdict(one) | {"measured_seconds": seconds, "off": off}
        shares = [f"{share:.2f}" for share in (one.rollout_idle, rollout, one.train_idle, train)]
        table.add_row(name, f"{one.seconds:.3f}", f"{seconds:.3f}", f"{off:+.0%}", *shares)
    return table, found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, metavar="FILE", help="results of bench.pipeline to compare with")
    parser.add_argument("--iterations", type=int, default=8, help="of each run on GPUs")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    arguments = parse(parser, iterations=2)
    found: dict[str, Any] = {}
    console = Console(width=140)
    if arguments.measured is not None:
        table, found["compared"] = compare(json.loads(arguments.measured.read_text()), arguments.seed)
        console.print(table)
    else:
        from bench import clusters  # it imports this module

        colocated = replace(gpus(64, 64), update=0.0)
        turn = simulate(colocated, PIPELINES["sync"], arguments.iterations, arguments.seed)
        found["64 GPUs in turn"] = asdict(turn)
        print(f"64 GPUs that generate and train in turn: {turn.seconds:.0f} s an iteration")
        made = {}
        for total in clusters.TOTALS:
            machine = gpus(total // 2, total // 2)
            made[total] = clusters.predicted(machine, arguments.iterations, arguments.seed)
            console.print(_shown(f"{total:,} GPUs, half for rollouts", made[total].pipelines))
            say(f"{total} GPUs are simulated  {arguments.iterations} iterations")
        console.print(clusters.shown(made))
        recipes = list(clusters.TRANSPORTED)[: 2 if arguments.smoke else None]
        table, found["transports"] = clusters.transports(recipes)
        console.print(table)
        print("Only GPUs can say:", *clusters.ONLY_GPUS, sep="\n  ")
        found |= {f"{total} GPUs": asdict(one) for total, one in made.items()}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
