"""GRPO on the same engines as a durable run, but without durability: the baseline for its cost.

    python -m bench.bare_loop [RECIPE] [--set a.b=c] [--seeds 42 1 2 3 4] [--apart 0 1] [--smoke] [--json FILE]

Rollout engines run in their own processes, the training engine in this one; they communicate through pipes. There is no
Prefect, no Ray, no ledger and no file. A durable run of the same configuration does the same arithmetic (its
`state_digest` is equal), so its additional time is the cost of durability.

With `rollout.pipeline=lagged` the halves of two iterations run concurrently, as in `cairn.flows.pipeline` with a lag of
1. Iteration i samples from the weights after i-2, the first two from the initial ones:

    a half          does                          in                    begins after
    collect of i    rollout, reward, advantage    a separate thread     collect of i-1, learn of i-2
    learn of i      train, sync                   the caller's thread   collect of i, learn of i-1

With `--apart A B` the trainer runs alone on core B, and everything else on core A.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import torch
from transformers import AutoTokenizer

from bench.command import SMALL_RUN, parse, say
from cairn.configs.loader import load
from cairn.configs.schema.evaluation import BenchmarkConfig
from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.training.torch.engine import TorchEngine
from cairn.engines.types.types import Completion, GenerateRequest, SamplingParams, TrainBatch
from cairn.tasks.advantages.batch import ScoredBatch
from cairn.tasks.advantages.step import estimate
from cairn.tasks.data.prompts import PromptData
from cairn.tasks.data.stream import draw
from cairn.tasks.evaluation.questions import eval_seed
from cairn.tasks.generation.groups import sample_seed
from cairn.tasks.generation.rollout import shard_rows
from cairn.tasks.grading.pool import GraderPool
from cairn.tasks.rewards.sample import Sample

Weights = tuple[int, dict[str, np.ndarray]]
"""A version, and all tensors by name."""

Apart = tuple[int, int] | None
"""Two cores: the trainer runs alone on the second, everything else on the first; None: any cores."""


@dataclass(frozen=True)
class Iteration:
    """An iteration of the loop."""

    reward: float
    tokens: int
    """Number of response tokens."""
    seconds: dict[str, float]
    """Seconds by step. Without overlap their sum is the iteration's time. With overlap the steps of two iterations run
    concurrently, and a rollout includes the loading of its weights, which otherwise is part of `sync`."""


@dataclass(frozen=True)
class Collected:
    """Results that one half of an iteration passes to the other."""

    batch: TrainBatch
    reward: float
    """Mean reward."""
    seconds: dict[str, float]
    """Seconds by step."""


@dataclass
class Outcome:
    """Results of a whole run."""

    seed: int
    score_before: dict[str, float]
    """Score by benchmark."""
    score_after: dict[str, float] = field(default_factory=dict)
    state_digest: str = ""
    iterations: list[Iteration] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    """Seconds from the first rollout's start to the end of each iteration; the last is the time of the whole run."""


class EngineProcess:
    """A rollout engine in a separate process."""

    def __init__(self, model_path: str, config: RolloutConfig) -> None:
        """Start the process; `wait_until_up` waits until it accepts requests."""
        context = get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, model_path, config), daemon=True)
        self._process.start()
        there.close()

    def wait_until_up(self) -> None:
        """Wait until the model is loaded."""
        self._connection.recv()

    def start_generating(self, requests: Sequence[GenerateRequest]) -> None:
        """Send requests; `completions` waits for their results."""
        self._connection.send(("generate", list(requests)))

    def completions(self) -> list[Completion]:
        """Wait for the results of the last requests and return them."""
        completions: list[Completion] = self._connection.recv()
        return completions

    def start_update(self, weights: Weights) -> None:
        """Send all weights; `finish_update` waits until they are served."""
        self._connection.send(("update", weights))

    def finish_update(self) -> None:
        """Wait for the end of an update."""
        self._connection.recv()

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join()


def _serve(connection: Connection, model_path: str, config: RolloutConfig) -> None:
    engine = TransformersEngine(model_path, config)
    connection.send(None)
    while True:
        try:
            task, argument = connection.recv()
        except EOFError:
            return
        if task == "generate":
            connection.send([completion for part in engine.generate(argument) for completion in part])
        else:
            version, weights = argument
            engine.begin_weight_update(version)
            engine.update_weights({name: torch.from_numpy(array) for name, array in weights.items()})
            engine.end_weight_update()
            connection.send(None)


class BareLoop:
    """The loop's engines. `config` must have the pipeline `sync`, or `lagged` with a lag of 1, no dynamic sampling, no
    top-p or top-k, no reference model and one optimizer step a rollout."""

    def __init__(self, config: RunConfig, apart: Apart = None) -> None:
        rollout, steps = config.rollout, config.training.num_steps_per_rollout
        unknown = rollout.dynamic_sampling_filter or rollout.cuts_vocabulary or config.algorithm.use_kl_loss
        if unknown or rollout.pipeline == "streaming" or rollout.weights_lag > 1 or steps > 1:
            raise SystemExit(
                "the bare loop knows no streaming, no lag above 1, no dynamic sampling, no top-p or top-k, no KL loss "
                "and one optimizer step a rollout"
            )
        self.config = config
        self.tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        self.data = PromptData.open(config.data, config.data.path, self.tokenizer)
        self.grader = GraderPool(config.reward)
        self.engines = [EngineProcess(config.model.path, config.rollout) for _ in range(config.rollout.num_engines)]
        self.trainer = TorchEngine(
            config.model,
            config.training,
            config.algorithm,
            temperature=config.rollout.rollout_temperature,
            total_steps=config.rollout.num_rollout * steps,
        )
        self.cursor = 0
        for engine in self.engines:
            engine.wait_until_up()
        self.collector = ThreadPoolExecutor(1)
        """Executes work while the caller's thread trains."""
        if apart is not None:  # engines and graders are where this process was
            self.collector.submit(os.sched_setaffinity, 0, {apart[0]}).result()
            os.sched_setaffinity(0, {apart[1]})

    def iterate(self, index: int) -> Iteration:
        """Execute both halves of an iteration one after the other: generate, grade, estimate advantages, train and
        update the rollout engines."""
        iteration, weights = self._learn(index, self._collect(index))
        with _timed(iteration.seconds, "sync"):
            self._update_engines(weights)
        return iteration

    def iterate_side_by_side(self) -> Iterator[Iteration]:
        """Execute all iterations. Each is collected while the previous one learns, with weights one iteration older
        than without overlap. At the end the engines serve the last weights."""
        total = self.config.rollout.num_rollout
        weights: Weights | None = None
        collecting = self.collector.submit(self._collect, 0)
        for index in range(total):
            collected = collecting.result()
            if index + 1 < total:
                collecting = self.collector.submit(self._collect, index + 1, weights)
            iteration, weights = self._learn(index, collected)
            yield iteration
        if weights is not None:
            self._update_engines(weights)

    def _collect(self, index: int, weights: Weights | None = None) -> Collected:
        """Generate the batch of an iteration, with `weights`, or with those that the engines already have."""
        config, rollout = self.config, self.config.rollout
        seconds: dict[str, float] = {}
        with _timed(seconds, "rollout"):
            if weights is not None:
                self._update_engines(weights)
            drawn = draw(
                self.data,
                self.cursor,
                rollout.rollout_batch_size,
                seed=config.seed,
                shuffle=config.data.rollout_shuffle,
                max_prompt_len=rollout.rollout_max_prompt_len,
            )
            self.cursor = drawn.cursor
            params = SamplingParams(
                max_new_tokens=rollout.rollout_max_response_len,
                temperature=rollout.rollout_temperature,
                top_p=rollout.rollout_top_p,
                top_k=rollout.rollout_top_k,
                stop_token_ids=rollout.rollout_stop_token_ids,
                stop=rollout.rollout_stop,
            )
            n = rollout.n_samples_per_prompt
            parts = [
                [
                    GenerateRequest(
                        (row.group_id, i),
                        row.prompt_ids,
                        sample_seed(config.seed, index, row.group_id, i),
                        params,
                    )
                    for row in shard_rows(drawn, part, len(self.engines))
                    for i in range(n)
                ]
                for part in range(len(self.engines))
            ]
            samples = self._generate(parts)
        rows = {row.group_id: row for row in drawn.rows}
        with _timed(seconds, "reward"):
            rewards = self._grade(self.grader, [(c, rows[c.request_id[0]].label) for c in samples])
        lengths = [len(c.response_ids) for c in samples]
        with _timed(seconds, "advantage"):
            masks = [np.ones(length, np.uint8) for length in lengths]
            scored = ScoredBatch(rewards, [n] * (len(rewards) // n), masks)
            advantages, _ = estimate(scored, config.algorithm)
            log_probs = [c.log_probs for c in samples]
            batch = TrainBatch(
                input_ids=[
                    np.concatenate([np.asarray(rows[c.request_id[0]].prompt_ids, np.int32), c.response_ids])
                    for c in samples
                ],
                response_lengths=lengths,
                loss_mask=masks,
                advantages=advantages,
                old_log_probs=log_probs if config.algorithm.use_rollout_logprobs else None,
                rollout_log_probs=log_probs,
            )
        return Collected(batch, float(rewards.mean()), seconds)

    def _learn(self, index: int, collected: Collected) -> tuple[Iteration, Weights]:
        """Update the newest weights on an iteration's batch, and return a copy of the new ones."""
        batch, seconds = collected.batch, dict(collected.seconds)
        with _timed(seconds, "train"):
            result = self.trainer.train(batch, num_steps=1, expected_version=index, input_digest=str(index))
        with _timed(seconds, "sync"):
            buckets = self.trainer.export_weights(self.config.fleet.update_weight_buffer_size)
            weights = {name: tensor.numpy() for bucket in buckets for name, tensor in bucket.items()}
        iteration = Iteration(collected.reward, sum(batch.response_lengths), seconds)
        return iteration, (result.weight_version, weights)

    def score(self, benchmark: BenchmarkConfig) -> float:
        """Return the mean reward on a benchmark, sampled with the seeds of the `eval` step."""
        data = PromptData.open(benchmark, benchmark.path, self.tokenizer)
        rows = [data.row(index) for index in range(len(data))]
        params = SamplingParams(
            max_new_tokens=benchmark.max_response_len,
            temperature=benchmark.temperature,
            top_p=benchmark.top_p,
            top_k=benchmark.top_k,
            stop_token_ids=self.config.rollout.rollout_stop_token_ids,
            stop=self.config.rollout.rollout_stop,
        )
        n = benchmark.n_samples_per_eval_prompt
        requests = [
            [
                GenerateRequest(
                    (row.index, i), row.prompt_ids, eval_seed(self.config.seed, benchmark.name, row.index, i), params
                )
                for row in rows[part :: len(self.engines)]
                for i in range(n)
            ]
            for part in range(len(self.engines))
        ]
        samples = self._generate(requests)
        with GraderPool(self.config.reward.of(benchmark.rm_type)) as grader:
            return float(self._grade(grader, [(c, rows[c.request_id[0]].label) for c in samples]).mean())

    def close(self) -> None:
        """End all processes."""
        self.collector.shutdown()
        self.grader.close()
        for engine in self.engines:
            engine.close()

    def _generate(self, parts: Sequence[Sequence[GenerateRequest]]) -> list[Completion]:
        for engine, requests in zip(self.engines, parts, strict=True):
            engine.start_generating(requests)
        samples = [completion for engine in self.engines for completion in engine.completions()]
        return sorted(samples, key=lambda c: c.request_id)

    def _grade(self, grader: GraderPool, samples: Sequence[tuple[Completion, str | None]]) -> np.ndarray:
        ids = [completion.response_ids.tolist() for completion, _ in samples]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        graded = grader.grade(
            [
                Sample(text, label, finish_reason=str(completion.finish_reason))
                for text, (completion, label) in zip(texts, samples, strict=True)
            ]
        )
        failed = [g.error for g in graded if g.reward is None]
        if failed:
            raise SystemExit(f"{len(failed)} samples could not be graded: {failed[0]}")
        return np.array([g.reward for g in graded], np.float32)

    def _update_engines(self, weights: Weights) -> None:
        for engine in self.engines:
            engine.start_update(weights)
        for engine in self.engines:
            engine.finish_update()


def run(config: RunConfig, apart: Apart = None) -> Iterator[Outcome]:
    """Execute the configuration; yield the growing outcome after each iteration and once more at the end. With `apart`
    the process must already be pinned to the first of these cores."""
    loop = BareLoop(config, apart)
    try:
        outcome = Outcome(config.seed, {b.name: loop.score(b) for b in config.eval.benchmarks})
        in_turn = (loop.iterate(index) for index in range(config.rollout.num_rollout))
        began = time.perf_counter()
        for iteration in loop.iterate_side_by_side() if config.rollout.weights_lag else in_turn:
            outcome.iterations.append(iteration)
            outcome.ends.append(time.perf_counter() - began)
            yield outcome
        outcome.score_after = {b.name: loop.score(b) for b in config.eval.benchmarks}
        outcome.state_digest = loop.trainer.state_digest()
        yield outcome
    finally:
        loop.close()


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - began


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="configs/recipes/quickstart.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override an option")
    parser.add_argument("--seeds", type=int, nargs="+", help="runs to make (default: the recipe's own seed)")
    parser.add_argument(
        "--apart", type=int, nargs=2, metavar="CORE", help="a core for all but the trainer, and its own"
    )
    arguments = parse(parser)
    small = ("rollout.num_rollout=2", *SMALL_RUN) if arguments.smoke else ()
    config = load(arguments.recipe, [*small, *arguments.set])
    outcomes = []
    for seed in arguments.seeds or [config.seed]:
        if arguments.apart:
            os.sched_setaffinity(0, {arguments.apart[0]})
        for outcome in run(config.model_copy(update={"seed": seed}), arguments.apart):
            done = len(outcome.iterations)
            say(f"seed {seed}: iteration {done:3}  reward {outcome.iterations[-1].reward:.3f}")
        outcomes.append(outcome)
        steps = {
            step: statistics.median(iteration.seconds[step] for iteration in outcome.iterations)
            for step in outcome.iterations[0].seconds
        }
        total = statistics.median(np.diff(outcome.ends, prepend=0.0))
        for name, before in outcome.score_before.items():
            print(f"seed {seed}: {name} {before:.3f} -> {outcome.score_after[name]:.3f}")
        print(
            f"seed {seed}: median iteration {total * 1000:.0f} ms ("
            + ", ".join(f"{step} {value * 1000:.0f}" for step, value in steps.items())
            + f"); state {outcome.state_digest[:16]}"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


if __name__ == "__main__":
    main()
