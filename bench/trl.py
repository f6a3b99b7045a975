"""A training step and an iteration of GRPO against TRL's GRPOTrainer: same model, same prompts, alternating.

    python -m bench.trl [RECIPE] [--set a.b=c] [--rounds 24] [--smoke] [--json FILE]

Two comparisons; in each, both sides alternate in one run:

  one thread   Cairn's engines in this process, without any framework, against TRL. TRL generates its own samples and
               then trains on Cairn's: both train on the same batches and must have the same weights, otherwise the
               benchmark ends with an error.
  durable run  `cairn train` (Prefect, Ray, Parquet, commits, all its processes) as the recipe has it, and `lagged` with
               a core for each half, against TRL with one thread and with two, each with its own samples. Turns are
               whole runs without their startup, and as many steps of TRL.

The first three iterations of each do not count. TRL has its own environment in .venv-trl, created on first use from
bench/trl-requirements.txt, and runs as a process that does one step on command; `bench.trl_process` has its settings.
The learning rate is constant on both sides.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import AutoTokenizer

from bench.command import SMALL_RUN, parse, say
from bench.durable_run import durable_run
from bench.meter import Meter
from bench.pipeline import LAGGED
from bench.trl_process import Step, TrlProcess, install
from cairn.configs.loader import load
from cairn.configs.plugins import load_callable
from cairn.configs.schema.run import RunConfig
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.training.torch.engine import TorchEngine
from cairn.engines.types.types import GenerateRequest, SamplingParams, TrainBatch
from cairn.tasks.advantages.batch import ScoredBatch
from cairn.tasks.advantages.step import estimate
from cairn.tasks.data.prompts import PromptData
from cairn.tasks.data.stream import Draw, draw
from cairn.tasks.generation.groups import sample_seed
from cairn.tasks.grading.graders import get_grader
from cairn.tasks.rewards.sample import Sample

WARM_UP = 3
"""Number of first iterations that are not counted."""

TOLERANCE = 0.02
"""Largest distance between the weights of both sides, as a share of the distance that training moved them."""

DURABLE_ROUNDS = 3
"""Number of turns of whole runs."""

PIPELINES = {"cairn, sync": (), "cairn, lagged": LAGGED}
"""Options in addition to the recipe's."""


class OneProcess:
    """Cairn's engines one after the other in this process, one thread. No KL loss, one optimizer step an iteration."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        self.data = PromptData.open(config.data, config.data.path, self.tokenizer)
        self.grade = load_callable(get_grader(config.reward).path)
        self.engine = TransformersEngine(config.model.path, config.rollout)
        self.trainer = TorchEngine(
            config.model,
            config.training,
            config.algorithm,
            temperature=config.rollout.rollout_temperature,
            total_steps=config.rollout.num_rollout,
        )
        self.cursor = 0

    def iterate(self, index: int) -> tuple[Step, list[list[int]]]:
        """Return the iteration's measurements, and its responses: those of the first prompt, then those of the second,
        …"""
        config, rollout = self.config, self.config.rollout
        meter = Meter()
        drawn = draw_prompts(config, self.data, self.cursor, rollout.rollout_batch_size)
        self.cursor = drawn.cursor
        params = SamplingParams(
            max_new_tokens=rollout.rollout_max_response_len,
            temperature=rollout.rollout_temperature,
            top_p=rollout.rollout_top_p,
            top_k=rollout.rollout_top_k,
            stop_token_ids=rollout.rollout_stop_token_ids,
        )
        n = rollout.n_samples_per_prompt
        requests = [
            GenerateRequest((row.group_id, i), row.prompt_ids, sample_seed(config.seed, index, row.group_id, i), params)
            for row in drawn.rows
            for i in range(n)
        ]
        samples = [sample for part in self.engine.generate(requests) for sample in part]
        samples.sort(key=lambda sample: sample.request_id)
        meter.mark("generation")
        rows = {row.group_id: row for row in drawn.rows}
        responses = [sample.response_ids.tolist() for sample in samples]
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        rewards = np.array(
            [self.grade(Sample(text, rows[s.request_id[0]].label)) for text, s in zip(texts, samples, strict=True)],
            np.float32,
        )
        lengths = [len(response) for response in responses]
        masks = [np.ones(length, np.uint8) for length in lengths]
        advantages, _ = estimate(ScoredBatch(rewards, [n] * (len(rewards) // n), masks), config.algorithm)
        log_probs = [sample.log_probs for sample in samples]
        batch = TrainBatch(
            input_ids=[
                np.concatenate([np.asarray(rows[s.request_id[0]].prompt_ids, np.int32), s.response_ids])
                for s in samples
            ],
            response_lengths=lengths,
            loss_mask=masks,
            advantages=advantages,
            old_log_probs=log_probs if config.algorithm.use_rollout_logprobs else None,
            rollout_log_probs=log_probs,
        )
        meter.mark("reward")
        self.trainer.train(batch, num_steps=1, expected_version=index, input_digest=str(index))
        meter.mark("training")
        self.engine.begin_weight_update(index + 1)
        for bucket in self.trainer.export_weights(config.fleet.update_weight_buffer_size):
            self.engine.update_weights(bucket)
        self.engine.end_weight_update()
        meter.mark("sync")
        return Step(meter.cpu, meter.wall, sum(lengths), float(rewards.mean())), responses


def draw_prompts(config: RunConfig, data: PromptData, cursor: int, count: int) -> Draw:
    """Draw prompts as the `rollout` step does."""
    return draw(
        data,
        cursor,
        count,
        seed=config.seed,
        shuffle=config.data.rollout_shuffle,
        max_prompt_len=config.rollout.rollout_max_prompt_len,
    )


def prompts_of_rounds(config: RunConfig, rounds: int) -> Draw:
    """Return the prompts of `rounds` iterations."""
    data = PromptData.open(config.data, config.data.path, AutoTokenizer.from_pretrained(config.model.path))
    return draw_prompts(config, data, 0, rounds * config.rollout.rollout_batch_size)


def compare_engines(config: RunConfig, rounds: int) -> dict[str, Any]:
    """Run both sides in one thread; return the steps of each, and the distance between the trained weights."""
    drawn = prompts_of_rounds(config, rounds)
    cairn = OneProcess(config)
    steps: dict[str, list[Step]] = {"cairn": [], "trl": []}
    with tempfile.TemporaryDirectory() as folder, TrlProcess(config, drawn, Path(folder), threads=1) as trl:
        for index in range(rounds):
            step, responses = cairn.iterate(index)
            steps["cairn"].append(step)
            steps["trl"].append(trl.step(responses))
            say(f"engines, round {index + 1} of {rounds}")
        trl.finish()
        before = load_file(Path(config.model.path) / "model.safetensors")
        peer = load_file(Path(folder) / "model.safetensors")
    own = {name: tensor for bucket in cairn.trainer.export_weights(1 << 30) for name, tensor in bucket.items()}
    distance = _distance(own, peer) / _distance(own, before)
    if distance > TOLERANCE:
        raise SystemExit(f"the two sides trained differently: their weights lie {distance:.1%} of the way apart")
    return {name: [asdict(step) for step in taken] for name, taken in steps.items()} | {"distance": distance}


def _distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return sum(float((left[name] - right[name]).double().square().sum()) for name in left) ** 0.5


def compare_durable(config: RunConfig, recipe: str, overrides: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Return the wall-clock seconds of an iteration on each side in every round, averaged over the iterations of
    `config`."""
    count = config.rollout.num_rollout - WARM_UP
    drawn = prompts_of_rounds(config, WARM_UP + rounds * count)
    seconds: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        processes = {
            f"trl, {threads} thread{'s' if threads > 1 else ''}": stack.enter_context(
                TrlProcess(config, drawn, Path(folder) / str(threads), threads=threads)
            )
            for threads in (1, 2)
        }
        for process in processes.values():
            for _ in range(WARM_UP):
                process.step()
        for number in range(rounds):
            for name, options in PIPELINES.items():
                seconds[name].append(durable_run(recipe, [*overrides, *options], after=WARM_UP).seconds / count)
            for name, process in processes.items():
                seconds[name].append(statistics.mean(sum(process.step().wall.values()) for _ in range(count)))
            say(f"durable runs, round {number + 1} of {rounds}")
    return dict(seconds)


def print_engines(console: Console, found: dict[str, Any]) -> None:
    """Print medians of the counted rounds, part by part."""
    table = Table("one thread, s", "Cairn CPU", "TRL CPU", "ratio", "Cairn wall", "TRL wall", "ratio")
    sides = {name: found[name][WARM_UP:] for name in ("cairn", "trl")}
    for part in ("generation", "reward", "training", "iteration"):
        cells = []
        for clock in ("cpu", "wall"):
            # The row `iteration` includes Cairn's sync. The sync has no row of its own, because TRL has only one model.
            own, peer = (
                [sum(step[clock].values()) if part == "iteration" else step[clock][part] for step in sides[name]]
                for name in ("cairn", "trl")
            )
            ratio = statistics.median(their / our for our, their in zip(own, peer, strict=True))
            cells += [f"{statistics.median(own):.3f}", f"{statistics.median(peer):.3f}", f"{ratio:.2f}"]
        table.add_row(part, *cells)
    console.print(table)
    tokens = {name: statistics.mean(step["tokens"] for step in steps) for name, steps in sides.items()}
    console.print(
        f"tokens generated an iteration: Cairn {tokens['cairn']:.0f}, TRL {tokens['trl']:.0f}; trained on the same "
        f"samples, the weights lie {found['distance']:.1e} of the way apart that training moved them"
    )


def print_durable(console: Console, seconds: dict[str, list[float]]) -> None:
    """Print medians of all rounds."""
    table = Table("durable runs, two cores", "median wall s", "range", *(f"× {name}" for name in PIPELINES))
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    for name, taken in seconds.items():
        ratios = [f"{medians[name] / medians[pipeline]:.2f}" for pipeline in PIPELINES]
        table.add_row(name, f"{medians[name]:.3f}", f"{min(taken):.3f} – {max(taken):.3f}", *ratios)
    console.print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="configs/recipes/quickstart.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override an option")
    parser.add_argument(
        "--rounds", type=int, default=24, help="iterations of each side, the first three of which warm up"
    )
    arguments = parse(parser, rounds=WARM_UP + 1)
    if arguments.rounds <= WARM_UP:
        parser.error(f"--rounds must be above {WARM_UP}")
    install()
    overrides = [
        f"rollout.num_rollout={arguments.rounds}",
        "eval.eval_interval=null",
        "eval.benchmarks=[]",
        "tracking.tensorboard_dir=null",
        "training.lr_decay_style=constant",
        "training.lr_warmup_iters=0",
        *(SMALL_RUN if arguments.smoke else ()),
        *arguments.set,
    ]
    config = load(arguments.recipe, overrides)
    if config.algorithm.use_kl_loss or config.training.num_steps_per_rollout > 1 or config.rollout.cuts_vocabulary:
        raise SystemExit("this comparison knows no KL loss, one optimizer step an iteration and no top-p or top-k")
    one_thread = load(arguments.recipe, [*overrides, "rollout.num_threads=1", "training.num_threads=1"])
    console = Console()
    engines = compare_engines(one_thread, arguments.rounds)
    print_engines(console, engines)
    durable = compare_durable(config, arguments.recipe, overrides, min(DURABLE_ROUNDS, arguments.rounds - WARM_UP))
    print_durable(console, durable)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"one thread": engines, "durable": durable}, indent=1) + "\n")


if __name__ == "__main__":
    main()
