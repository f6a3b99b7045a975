"""Peak memory of a logit in training and in scoring, and the error of log-probs and entropies.

    python -m bench.logits [--vocabulary 151936] [--tokens 2048] [--ranks 1 2] [--rounds 2] [--smoke] [--json FILE]

Memory: one sample through whole engines on a tiny model (hidden size 8, one layer), whose logits are nearly all that a
pass allocates. `training` is forward and backward pass of GRPO with an entropy bonus and temperature 0.7, `scoring` the
log-probs. The most bytes that are allocated at a time, beside those before, are divided by the number of a rank's
logits. Megatron's ranks share the vocabulary. "PyTorch's own functions" are log_softmax, gather and the entropy's sum
under autograd, from the same output layer.

Values: log-probs and entropies of normally distributed logits, in the parts of the vocabulary that these ranks have,
against log_softmax over the whole in float64, and the log-probs also against logit - logsumexp over the whole in
float32.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.command import parse, say
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.factory import make_engine
from cairn.engines.training.vocabulary import Part, Softmax, evaluate
from cairn.engines.types.types import TrainBatch
from tests.flows.plan.measured import highest

HIDDEN, PROMPT, TEMPERATURE = 8, 64, 0.7
SCALES = (0.25, 3.0)
"""Standard deviations of the logits whose values are checked: of an untrained model, and of a trained one."""
VALUE_ROWS = 64
OWN = "PyTorch's own functions"

Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the sample, of which 64 are the prompt")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="ranks that share the vocabulary")
    parser.add_argument("--rounds", type=int, default=2, help="passes of each kind; the least of their peaks counts")
    options = parse(parser, vocabulary=4096, tokens=256, ranks=[1], rounds=1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        build_model(options.vocabulary, options.tokens, folder)
        cases = [(OWN, 1), ("torch", 1), *(("megatron", ranks) for ranks in options.ranks)]
        for number, ((engine, ranks), dtype) in enumerate(product(cases, ("float32", "bfloat16"))):
            say(f"{engine}, {ranks} rank(s), {dtype}")
            work = Path(folder) / f"case{number}"
            work.mkdir()
            arguments = (engine, ranks, dtype, folder, work, options.vocabulary, options.tokens, options.rounds)
            torch.multiprocessing.start_processes(take_part, arguments, nprocs=ranks, start_method="spawn")
            reports = [json.loads((work / f"{rank}.json").read_text()) for rank in range(ranks)]
            own = {"engine": engine, "ranks": ranks, "dtype": dtype}
            results.append(own | {key: max(report[key] for report in reports) for key in reports[0]})
    show(results)
    if options.json is not None:
        options.json.write_text(json.dumps({**vars(options), "json": None, "results": results}, indent=1) + "\n")


def show(results: list[Result]) -> None:
    """Print both tables."""
    memory = Table("", "ranks", "format", "bytes a logit: training", "scoring")
    values = Table("", "ranks", "logits", "log-prob: float64", "float32", "entropy: float64")
    for result in results:
        first = (result["engine"], str(result["ranks"]))
        memory.add_row(*first, result["dtype"], f"{result['training']:.2f}", f"{result['scoring']:.2f}")
        for scale in SCALES if f"log_probs {SCALES[0]}" in result else ():
            found = [result[f"{name} {scale}"] for name in ("log_probs", "log_probs32", "entropies")]
            values.add_row(*first, f"std {scale}", *(f"{value:.1e}" for value in found))
    Console().print(memory)
    Console().print(values)


def take_part(rank: int, engine: str, ranks: int, dtype: str, folder: str, work: Path, *sizes: int) -> None:
    """Measure on one rank of a case, and write a report."""
    torch.set_num_threads(1)
    vocabulary, tokens, rounds = sizes
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=ranks)
    passes = (
        own_functions(vocabulary, tokens, dtype)
        if engine == OWN
        else engine_passes(engine, rank, ranks, *sizes[:2], dtype, folder)
    )
    report: Result = {}
    for name, (call, rows) in passes.items():
        peaks = []
        for _ in range(rounds + 1):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                call()
            peaks.append(highest(profiled))
        report[name] = min(peaks[1:]) / (rows * vocabulary / ranks)  # the first pass allocates the gradients too
    if engine != OWN and dtype == "float32":
        report |= errors(rank, ranks, vocabulary)
    (work / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def engine_passes(
    engine: str, rank: int, ranks: int, vocabulary: int, tokens: int, dtype: str, folder: str
) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return the passes of an engine, with the number of rows of their logits."""
    training = TrainingConfig.model_validate(
        {
            "engine": engine,
            "world_size": ranks,
            "num_threads": 1,
            "dtype": dtype,
            "megatron": {"tensor_model_parallel_size": ranks} if engine == "megatron" else {},
        }
    )
    made: Any = make_engine(
        ModelConfig(path=folder),
        training,
        AlgorithmConfig(entropy_coef=0.01),
        temperature=TEMPERATURE,
        total_steps=100,
        rank=rank,
        world_size=ranks,
    )
    batch = make_batch(vocabulary, tokens)
    made.train(batch, num_steps=1, expected_version=0, input_digest="")
    learner, seen = made._learners["actor"], []
    accumulate = learner.accumulate_gradients
    learner.accumulate_gradients = lambda *given: seen.append(given) or accumulate(*given)
    made.train(batch, num_steps=1, expected_version=1, input_digest="")
    rows = tokens if engine == "megatron" else tokens - PROMPT
    return {
        "training": (lambda: accumulate(*seen[0]), rows),
        "scoring": (lambda: made.score(batch, "actor"), rows),
    }


def own_functions(vocabulary: int, tokens: int, dtype: str) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return passes of an output layer and PyTorch's own functions."""
    rows = tokens // 4  # they take several times the memory
    head = torch.nn.Linear(HIDDEN, vocabulary, bias=False, dtype=getattr(torch, dtype))
    hidden = torch.randn(rows, HIDDEN, dtype=head.weight.dtype)
    targets = torch.randint(0, vocabulary, (rows, 1))

    def score() -> torch.Tensor:
        return (head(hidden).float() / TEMPERATURE).log_softmax(-1).gather(-1, targets)

    def train() -> None:
        log_softmax = (head(hidden).float() / TEMPERATURE).log_softmax(-1)
        entropies = -(log_softmax.exp() * log_softmax).sum(-1)
        (log_softmax.gather(-1, targets).mean() + 0.01 * entropies.mean()).backward()

    return {"training": (train, rows), "scoring": (torch.no_grad()(score), rows)}


def errors(rank: int, ranks: int, vocabulary: int) -> Result:
    """Return the largest differences of values, for logits that all ranks draw."""
    width = -(-vocabulary // ranks)
    part = Part(rank * width, vocabulary, dist.group.WORLD if ranks > 1 else None)
    report: Result = {}
    for scale in SCALES:
        draw = torch.Generator().manual_seed(0)
        logits = torch.randn(VALUE_ROWS, width * ranks, generator=draw) * scale
        targets = torch.randint(0, vocabulary, (VALUE_ROWS,), generator=draw)
        found = evaluate(logits[:, part.first : part.first + width], targets, Softmax(1.0, part=part), entropy=True)
        assert found.entropies is not None
        whole = logits[:, :vocabulary].double().log_softmax(-1)
        single = logits[:, :vocabulary].gather(-1, targets[:, None])[:, 0] - logits[:, :vocabulary].logsumexp(-1)
        right = whole.gather(-1, targets[:, None])[:, 0]
        entropies = -(whole.exp() * whole).sum(-1)
        report |= {
            f"log_probs {scale}": (found.log_probs - right).abs().max().item(),
            f"log_probs32 {scale}": (found.log_probs - single).abs().max().item(),
            f"entropies {scale}": (found.entropies - entropies).abs().max().item(),
        }
    return report


def build_model(vocabulary: int, tokens: int, folder: str) -> None:
    """Save a model whose logits are larger than everything else."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=2,
        max_position_embeddings=tokens,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_batch(vocabulary: int, tokens: int) -> TrainBatch:
    """Return one sample."""
    draw, length = np.random.default_rng(0), tokens - PROMPT
    return TrainBatch(
        input_ids=[draw.integers(0, vocabulary, tokens).astype(np.int32)],
        response_lengths=[length],
        loss_mask=[np.ones(length, np.uint8)],
        advantages=[draw.normal(size=length).astype(np.float32)],
        old_log_probs=[np.full(length, -12.0, np.float32)],
    )


if __name__ == "__main__":
    main()
