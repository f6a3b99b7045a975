"""How fast the three pipelines are on other machines: a simulation of their events, with rates that are published or
measured.

    python -m bench.pipeline_sim [--measured FILE] [--seed 0] [--smoke] [--json FILE]

Without a file: 64 and 1,024 GPUs, half of them for rollouts, 512 prompts of 16 responses an iteration. Rates are those
of Qwen2.5-Math-7B on H20:

    decoding       a step reads the weights (15.2 GB) and the caches (57 kB a token) at 4 TB/s, and has 1 ms beside
    lengths        log-normal, the 99th percentile ten times the median (Laminar, arXiv 2510.12633), cut at 28 k tokens;
                   the median is the one with which 64 GPUs generate for 151 s in turn, as verl measured
    training       157 s a batch on 32 GPUs, as verl measured (its docs/advance/fully_async.md, table of 7B), in
                   proportion to tokens and GPUs
    new weights    2 s (NeMo-RL 0.7 to 1.5 s for 30B, verl 2.5 to 3 s for 27B)

With the results of `python -m bench.pipeline --json FILE`: rates are taken from its runs of `sync` alone, by least
squares over their iterations, and what they predict is compared with the other runs.

The model. An engine decodes all of its samples in step; a step takes `step` seconds, and `step_each` more for every
sample. What is read first, a prompt, or the prefixes of interrupted samples under new weights, holds it up. The trainer
takes a batch as it was cut. An iteration has `fixed` seconds that neither side works in, half of them before its batch
is cut and half before it is trained; on two cores both sides are slower by what these take beside them. Evaluations are
left out. The rules are those of docs/architecture.md:

    sync          prompts of iteration i are admitted when i - 1 is learned
    lagged        when i - 2 is learned and the batch before is complete
    streaming S   when i - 1 - S is learned, and learning waited for one of its last three batches while engines have
                  less than a batch to work on and less than a batch waits, or nothing else is left for the next batch;
                  a batch takes what the next finds too old, then what was complete first
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
"""Draws the lengths of the responses of a group, tokens."""


@dataclass(frozen=True)
class Machine:
    """What a run is made on, and of."""

    engines: int
    """Of rollout; they have no part in training."""
    groups: int
    """Prompts of an iteration."""
    group_size: int
    lengths: Lengths
    prompt_tokens: float
    step: float
    """Seconds of a decoding step, …"""
    step_each: float
    """… and of each sample in it."""
    prefill_rate: float
    """Tokens per second of an engine."""
    train_fixed: float
    """Seconds of an update, …"""
    train_rate: float
    """… which trains so many response tokens per second, …"""
    update: float
    """… and hands on its weights, in which it is not trained."""
    fixed: float = 0.0
    """Seconds of an iteration in which neither side works."""
    slots: int = 1024
    """Samples that an engine decodes at once; others wait."""
    cores: int | None = None
    """Of the whole machine, where one engine, the trainer and what takes `fixed` seconds share them; None: each side
    has its own."""

    def slowed(self, by: float) -> "Machine":
        """Both sides take so many times as long."""
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
    """`lag` publications: 0 is `sync`, 1 `lagged`. With `max_age` it streams."""

    lag: int = 0
    max_age: int | None = None


PIPELINES = {
    "sync": Pipeline(),
    "lagged": Pipeline(lag=1),
    **{f"streaming {age}": Pipeline(max_age=age) for age in (1, 2, 4)},
}


@dataclass(frozen=True)
class Prediction:
    """Of a run, evaluations left out."""

    seconds: float
    """Of an iteration, the mean."""
    tokens_per_second: float
    rollout_idle: float
    """Share of the time in which an engine does not work, the mean over engines."""
    train_idle: float


@dataclass(eq=False)
class _Group:
    iteration: int
    """That admitted it."""
    left: int
    """Samples that have not ended."""
    tokens: int = 0
    oldest: int | None = None
    """Weights that its first token was sampled with; None before."""


@dataclass
class _Engine:
    machine: Machine
    queue: deque[tuple[int, _Group]] = field(default_factory=deque)
    """Lengths, and whose."""
    open: list[tuple[float, int, float, _Group]] = field(default_factory=list)
    """A heap: the step at which a sample ends, a number, the step at which it began, and whose it is."""
    now: float = 0.0
    steps: float = 0.0
    stalled: float = 0.0
    """Seconds that it is held up."""
    busy: float = 0.0
    begun: int = 0

    def advance(self, to: float) -> None:
        """Work until then."""
        seconds, self.now = to - self.now, to
        if not self.open and not self.stalled:
            return
        held = min(seconds, self.stalled)
        self.stalled -= held
        self.busy += held
        if self.open:
            self.busy += seconds - held
            self.steps += (seconds - held) / self._step()

    def fill(self, version: int) -> None:
        """Begin what there is room for."""
        while self.queue and len(self.open) < self.machine.slots:
            length, group = self.queue.popleft()
            self.begun += 1
            heapq.heappush(self.open, (self.steps + length, self.begun, self.steps, group))
            self.stalled += self.machine.prompt_tokens / self.machine.prefill_rate
            group.oldest = version if group.oldest is None else group.oldest

    def take_weights(self) -> None:
        """Load new ones and read the prefixes of all that is open again."""
        if self.open:
            tokens = sum(self.steps - began + self.machine.prompt_tokens for _, _, began, _ in self.open)
            self.stalled += self.machine.update + tokens / self.machine.prefill_rate

    def next_end(self) -> float:
        """When the next sample ends, as things are."""
        if not self.open:
            return math.inf
        return self.now + self.stalled + max(0.0, self.open[0][0] - self.steps) * self._step()

    def _step(self) -> float:
        return self.machine.step + self.machine.step_each * len(self.open)


def simulate(machine: Machine, pipeline: Pipeline, iterations: int, seed: int = 0) -> Prediction:
    """A run of so many iterations, from its beginning to its last update's end."""
    found = _simulate(machine, pipeline, iterations, seed)
    if machine.cores is None or pipeline == Pipeline():
        return found
    for _ in range(_ROUNDS):
        left = machine.cores - machine.fixed / found.seconds
        found = _simulate(machine.slowed(max(1.0, 2 / left)), pipeline, iterations, seed)
    return found


_ROUNDS = 6
"""In which the length of an iteration settles, on which depends what is left for both sides."""


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
        """When a batch is ready to be trained, and its tokens."""
        self.learning: float | None = None
        """When the update that is being made ends."""
        self.free_since = 0.0
        """When the last one ended."""
        self.waited = deque[bool](maxlen=3)
        """Of the last batches: was it ready after the update before?"""
        self.ends: list[tuple[float, int, int]] = []
        """A heap: when an engine's next sample ends, as things were after so many of its changes, and its number."""
        self.changes = [0] * machine.engines
        self._progress()

    def next_event(self) -> None:
        """Go on to whatever happens next."""
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
        """Of an engine; whether a group is complete by that."""
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
        """As `cairn.tasks.streaming.stream.Pacing` does."""
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
            # What batch i + 1 would find more than `age` publications old has to be in batch i.
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
    """Lengths of at least one token, cut at `longest`."""

    def draw(chance: np.random.Generator, count: int) -> np.ndarray:
        return np.clip(np.rint(chance.lognormal(math.log(median), sigma, count)), 1, longest)

    return draw


TAIL = math.log(10) / 2.326
"""Sigma of a log-normal distribution whose 99th percentile is ten times its median."""

MEDIAN_LENGTH, LONGEST = 1400, 28_000
H20_BYTES = 4e12
"""Per second."""
WEIGHTS, CACHE = 15.2e9, 57_344
"""Bytes of the 7B model in bfloat16, and of a token's keys and values: 28 layers, 4 heads of 128."""


def gpus(rollout: int, training: int) -> Machine:
    """The published rates on so many GPUs, an engine each."""
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
    """The machine on which these runs of `sync` were made, by least squares over their iterations: rollouts on steps
    and tokens, updates on a constant and tokens."""
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
    """Coefficients, none of them negative: a column whose own would be is left out."""
    matrix, target = np.stack(columns, 1), np.asarray(wanted, float)
    found = np.linalg.lstsq(matrix, target, rcond=None)[0]
    if (found < 0).any():
        kept = int(np.argmax(found))
        found = np.zeros(len(columns))
        found[kept] = matrix[:, kept] @ target / (matrix[:, kept] @ matrix[:, kept])
    return tuple(float(value) for value in found)


def predictions(machine: Machine, iterations: int, seed: int) -> dict[str, Prediction]:
    """Of every pipeline."""
    return {name: simulate(machine, pipeline, iterations, seed) for name, pipeline in PIPELINES.items()}


def _shown(title: str, found: dict[str, Prediction]) -> Table:
    table = Table("", "s an iteration", "times sync", "tokens/s", "rollout idle", "trainer idle", title=title)
    for name, one in found.items():
        faster = one.tokens_per_second / found["sync"].tokens_per_second
        shares = f"{one.rollout_idle:.2f}", f"{one.train_idle:.2f}"
        table.add_row(name, f"{one.seconds:.2f}", f"{faster:.2f}", f"{one.tokens_per_second:,.0f}", *shares)
    return table


def compare(rows: dict[str, list[dict[str, Any]]], seed: int) -> tuple[Table, dict[str, dict[str, float]]]:
    """What is predicted for the machine of these runs, beside what was measured there."""
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
        colocated = replace(gpus(64, 64), update=0.0)
        turn = simulate(colocated, PIPELINES["sync"], arguments.iterations, arguments.seed)
        found["64 GPUs in turn"] = asdict(turn)
        print(f"64 GPUs that generate and train in turn: {turn.seconds:.0f} s an iteration")
        for total in (64, 1024):
            made = predictions(gpus(total // 2, total // 2), arguments.iterations, arguments.seed)
            console.print(_shown(f"{total:,} GPUs, half for rollouts", made))
            found[f"{total} GPUs"] = {name: asdict(one) for name, one in made.items()}
            say(f"{total} GPUs are simulated  {arguments.iterations} iterations")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
