"""Time and memory that Cairn's engines take of one GPU at a real size, section by section.

    python -m bench.gpu SECTION… [--device cuda] [--models FOLDER] [--smoke] [--json FILE]

Every finding is one line of JSON, printed and appended to `--json` as soon as it is known, so that a run that is cut
short keeps what it found. A section that fails reports its error, and the next one runs; the exit status then is 1.
Neither Ray, Prefect nor SGLang is imported: `tests/gpu/one_gpu.sh` calls this on a bare machine with PyTorch.

- `torch`, `megatron`: an engine with Qwen3-1.7B's sizes and random weights. Tokens a second, share of the GPU's peak,
  peak memory, the state digest's share of a step, offload and onload, export by handles and through the host.
- `deterministic`, `nondeterministic`: whether the same update ends in the same bits twice, and how long it takes, with
  and without `training.deterministic_mode`.
- `logprobs`: peak bytes a logit of one sample's loss and log-probs, with 151,936 tokens of vocabulary. The longest
  sample is the one before memory ends.
- `broadcast`: the trainer's group for weights, made and left twice, with itself as the only member.
- `handles`: GPU memory that stays reserved after another process has read it by a handle.
- `rollout`: tokens a second of the transformers engine, and whether its samples depend on their company.
- `absent`: seconds until a group ends whose receiver never joins.

Megatron computes with Transformer Engine where it is installed, otherwise with PyTorch's modules
(`tests.gpu.torch_modules`). The share of the peak counts 6 operations a parameter and token, without those of attention
and of recomputed activations; the peak is that of an H100 or H200 in bfloat16, 989 TFLOP/s.
"""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import cairn.configs
from bench.command import parse
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.training.collate import Tokens
from cairn.engines.training.factory import make_engine
from cairn.engines.training.losses.objective import objective
from cairn.engines.training.megatron import backend
from cairn.engines.training.process import join_process_group
from cairn.engines.training.torch.passes import read_log_probs
from cairn.engines.training.weight_group import SendingGroup, flatten
from cairn.engines.types.errors import EngineError
from cairn.engines.types.types import GenerateRequest, SamplingParams, TrainBatch
from cairn.engines.weights.buckets import in_one_storage, share
from tests.gpu.handles import sums_in_another_process
from tests.gpu.torch_modules import torch_modules

PEAK = 989e12
"""Operations a second of an H100 or H200 in bfloat16, dense."""

BUCKET = 512 << 20
"""Bytes of a bucket of weights."""

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
"""Sizes of the model with `--smoke`."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Bench:
    """Where and at which size the sections measure, and where their findings go."""

    device: str
    models: Path
    smoke: bool
    json: Path | None

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def found(self, section: str, **values: Any) -> None:
        """Report one finding at once."""
        line = json.dumps({"section": section, **values})
        print(line, flush=True)
        if self.json is not None:
            with self.json.open("a") as file:
                file.write(line + "\n")

    def timed(self, work: Callable[[], Result]) -> tuple[Result, float]:
        """Return a result, and the seconds until the device has computed it."""
        self._wait()
        began = time.perf_counter()
        result = work()
        self._wait()
        return result, time.perf_counter() - began

    def peak_gib(self) -> float:
        """Return the most memory that was allocated since the last call; 0 on a CPU."""
        if not self.on_gpu:
            return 0.0
        most = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return round(most, 2)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved() if self.on_gpu else 0

    def clear(self) -> None:
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def model_folder(bench: Bench) -> Path:
    """Return a folder with random weights in bfloat16, which is made once."""
    folder = bench.models / ("small" if bench.smoke else "Qwen3-1.7B")
    if not (folder / "config.json").exists():
        published = Path(cairn.configs.__file__).parent / "models" / "Qwen" / "Qwen3-1.7B.json"
        sizes = json.loads(published.read_text()) | (SMALL if bench.smoke else {})
        torch.manual_seed(0)
        with torch.device(bench.device):
            model = Qwen3ForCausalLM(Qwen3Config(**sizes)).bfloat16()
        model.save_pretrained(folder)
        del model
        bench.clear()
    return folder


def make_batch(bench: Bench, samples: int, longest: int, seed: int = 0) -> TrainBatch:
    """Return samples with prompts of 64 tokens and responses whose lengths are exponential, the first the longest."""
    if bench.smoke:
        samples, longest = min(samples, 8), min(longest, 96)
    draw = np.random.default_rng(seed)
    lengths = np.minimum(longest, draw.exponential(longest / 4, samples).astype(int) + 16)
    lengths[0] = longest
    vocabulary = 1000 if bench.smoke else 150_000

    def log_probs() -> list[np.ndarray]:
        # Near those of random weights, so that ratios are near 1.
        return [draw.normal(-np.log(vocabulary), 0.1, n).astype(np.float32) for n in lengths]

    return TrainBatch(
        input_ids=[draw.integers(vocabulary, size=n + 64).astype(np.int32) for n in lengths],
        response_lengths=lengths.tolist(),
        loss_mask=[np.ones(n, np.uint8) for n in lengths],
        advantages=[np.full(n, draw.normal(), np.float32) for n in lengths],
        old_log_probs=log_probs(),
        rollout_log_probs=log_probs(),
    )


def tokens_of(batch: TrainBatch) -> int:
    return sum(map(len, batch.input_ids))


def training_engine(bench: Bench, kind: str, **options: Any) -> tuple[Any, float]:
    """Return an engine on the model, and the seconds that it took to load it."""
    training = {
        "engine": kind,
        "dtype": "bfloat16",
        "lr": 1e-6,
        "num_gpus_per_rank": int(bench.on_gpu),
        "max_tokens_per_gpu": 256 if bench.smoke else 8192,
        "gradient_checkpointing": True,
        **options,
    }
    return bench.timed(
        lambda: make_engine(
            ModelConfig(path=str(model_folder(bench))),
            TrainingConfig.model_validate(training),
            AlgorithmConfig(),
            temperature=1.0,
            total_steps=100,
            device=bench.device,
        )
    )


def update(bench: Bench, engine: Any, batch: TrainBatch) -> tuple[Any, dict[str, Any]]:
    """Take one optimizer step. Return its result and how fast it was."""
    version = engine.position().weight_version
    bench.peak_gib()
    result, seconds = bench.timed(
        lambda: engine.train(batch, num_steps=1, expected_version=version, input_digest=str(version))
    )
    tokens = tokens_of(batch)
    parameters = sum(tensor.numel() for bucket in engine.export_weights(BUCKET) for tensor in bucket.values())
    return result, {
        "step_s": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds),
        "share_of_peak": round(6 * parameters * tokens / seconds / PEAK, 4) if bench.on_gpu else None,
        "peak_gib": bench.peak_gib(),
        "loss": result.metrics["loss"],
    }


def train_on(bench: Bench, kind: str, **options: Any) -> None:
    """Measure steps, scores, digests, memory that changes hands, and exports of one training engine."""
    bench.clear()
    engine, seconds = training_engine(bench, kind, **options)
    bench.found(kind, load_s=round(seconds, 1), load_peak_gib=bench.peak_gib())
    update(bench, engine, make_batch(bench, 8, 2048))  # the first step of a process compiles and allocates
    batch = make_batch(bench, 64, 8192)
    _, found = update(bench, engine, batch)
    bench.found(kind, **found)
    digest, seconds = bench.timed(engine._compute_digest)
    bench.found(kind, state_digest_s=round(seconds, 3), state_digest_of_step=round(seconds / found["step_s"], 4))
    bench.peak_gib()
    _, seconds = bench.timed(lambda: engine.score(batch, "actor"))
    bench.found(kind, score_tokens_per_s=round(tokens_of(batch) / seconds), score_peak_gib=bench.peak_gib())
    for turn in range(2):  # the first one allocates the host's pinned memory
        before = bench.reserved()
        _, away = bench.timed(engine.offload)
        stays = bench.reserved()
        _, back = bench.timed(engine.onload)
        bench.found(
            kind,
            turn=turn,
            offload_s=round(away, 2),
            onload_s=round(back, 2),
            freed_gib=round((before - stays) / 2**30, 2),
            stays_gib=round(stays / 2**30, 2),
        )
    bench.found(kind, same_bits_after_offload=engine._compute_digest() == digest)
    export_from(bench, kind, engine)


def export_from(bench: Bench, kind: str, engine: Any) -> None:
    """Measure how fast weights leave an engine: as handles on its GPU, and through the host for a broadcast."""

    def by_handles() -> int:
        total = 0
        for bucket in engine.export_on_device(BUCKET):
            held = in_one_storage(bucket, torch.device(bench.device))
            share(held)
            total += sum(tensor.nbytes for tensor in held.values())
        return total

    def by_host() -> int:
        total = 0
        for bucket in engine.export_weights(BUCKET):
            _, flat = flatten(bucket, torch.device("cpu"))
            total += flat.to(bench.device).nbytes
        return total

    def measure(way: str, work: Callable[[], int]) -> None:
        bench.peak_gib()
        total, seconds = bench.timed(work)
        bench.found(
            kind,
            export=way,
            bytes=total,
            seconds=round(seconds, 2),
            gb_per_s=round(total / seconds / 1e9, 2),
            peak_gib=bench.peak_gib(),
        )

    measure("by handles", by_handles)
    measure("through the host", by_host)
    engine.offload()
    measure("by handles, offloaded", by_handles)
    engine.onload()
    _, seconds = bench.timed(lambda: engine.weights_checksum("bfloat16"))
    bench.found(kind, weights_checksum_s=round(seconds, 3))


def train_torch(bench: Bench) -> None:
    train_on(bench, "torch")


def train_megatron(bench: Bench) -> None:
    prepare_megatron(bench)
    train_on(bench, "megatron", megatron={"use_distributed_optimizer": True})


def prepare_megatron(bench: Bench) -> None:
    """Let Megatron compute with PyTorch's modules where Transformer Engine is missing."""
    missing = find_spec("transformer_engine") is None
    if bench.on_gpu and missing:
        backend._gpu = torch_modules
    bench.found("megatron", modules="PyTorch" if missing else "Transformer Engine")


def repeat(bench: Bench, *, deterministic: bool) -> None:
    """Take the same updates twice, from the same weights."""
    section = "deterministic" if deterministic else "nondeterministic"
    digests = []
    for _ in range(2):
        bench.clear()
        engine, _ = training_engine(bench, "torch", deterministic_mode=deterministic)
        update(bench, engine, make_batch(bench, 8, 2048))
        result, found = update(bench, engine, make_batch(bench, 32, 8192, seed=3))
        digests.append(result.state_digest)
        bench.found(section, **found)
        del engine
    bench.found(section, same_bits_twice=digests[0] == digests[1])


def measure_log_probs(bench: Bench) -> None:
    """Measure loss and log-probs of one sample, from its logits in bfloat16 on, as both engines compute them."""
    vocabulary = SMALL["vocab_size"] if bench.smoke else 151_936
    algorithm = AlgorithmConfig()
    prepare_megatron(bench)
    backend.backend_for(torch.device(bench.device))
    from cairn.engines.training.megatron.engine import Policy
    from cairn.engines.training.megatron.model import join_groups

    join_process_group(1)
    join_groups(TrainingConfig(engine="megatron"))
    policy = Policy(vocabulary, 1.0)
    # Megatron's passes convert the logits before they call these.
    engines: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "torch": (
            partial(objective, algorithm=algorithm, temperature=1.0),
            partial(read_log_probs, temperature=1.0),
        ),
        "megatron": (
            lambda logits, tokens: policy.objective(logits.float(), tokens, algorithm),
            lambda logits, tokens: policy.read(logits.float(), tokens),
        ),
    }
    for name, (loss_of, read) in engines.items():
        for length in (64,) if bench.smoke else (4096, 8192, 16384, 32768):
            bench.clear()
            try:
                measure_logits(bench, name, length, vocabulary, loss_of, read)
            except torch.cuda.OutOfMemoryError as error:
                bench.found("logprobs", engine=name, tokens=length, out_of_memory=str(error)[:120])
                break


def measure_logits(
    bench: Bench,
    name: str,
    length: int,
    vocabulary: int,
    loss_of: Callable[..., Any],
    read: Callable[..., Any],
) -> None:
    tokens = one_sample(length, bench.device)
    bench.peak_gib()
    logits = torch.randn(length, vocabulary, device=bench.device, dtype=torch.bfloat16)
    with torch.no_grad():
        _, scored = bench.timed(lambda: read(logits, tokens))
    score_peak = bench.peak_gib()
    logits.requires_grad_()
    _, trained = bench.timed(lambda: loss_of(logits, tokens)[0].backward())
    train_peak = bench.peak_gib()
    bench.found(
        "logprobs",
        engine=name,
        tokens=length,
        score_ms=round(scored * 1e3, 1),
        train_ms=round(trained * 1e3, 1),
        score_bytes_a_logit=round(score_peak * 2**30 / length / vocabulary, 1),
        train_bytes_a_logit=round(train_peak * 2**30 / length / vocabulary, 1),
        train_peak_gib=train_peak,
    )


def one_sample(length: int, device: str) -> Tokens:
    """Return a micro-batch of one sample, all of whose tokens are trained."""
    ids = torch.zeros(length, dtype=torch.int64, device=device)

    def values(number: float) -> torch.Tensor:
        return torch.full((length,), number, device=device)

    return Tokens(
        input_ids=ids[None],
        positions=ids,
        targets=ids,
        weights=values(1 / length),
        shares=values(1 / length),
        samples=ids,
        groups=ids[:1],
        counts=torch.tensor([float(length)], device=device),
        advantages=values(1.0),
        old_log_probs=values(-11.9),
    )


def broadcast(bench: Bench) -> None:
    data = torch.zeros((1 << 20) if bench.smoke else (1 << 28), dtype=torch.uint8, device=bench.device)

    def send_twice(name: str) -> None:
        group = SendingGroup(name, "127.0.0.1", 30.0)
        group.join(1, "nccl" if bench.on_gpu else "gloo")
        group.send(data)
        group.send(data)
        group.leave()

    for turn in range(2):
        _, seconds = bench.timed(partial(send_twice, f"turn-{turn}"))
        bench.found("broadcast", turn=turn, seconds=round(seconds, 2))


def wait_for_an_absent_receiver(bench: Bench) -> None:
    deadline = 2.0 if bench.smoke else 10.0
    group = SendingGroup("absent", "127.0.0.1", deadline)
    data = torch.zeros(1024, device=bench.device)

    def ends() -> str | None:
        try:
            group.join(2, "nccl" if bench.on_gpu else "gloo")
            group.send(data)
        except EngineError as error:
            return type(error).__name__
        return None

    error, seconds = bench.timed(ends)
    bench.found("absent", deadline_s=deadline, ended_s=round(seconds, 1), error=error)
    group.leave()


def read_by_handle(bench: Bench) -> None:
    values = {str(number): torch.full((1024, 777), float(number)) for number in range(64)}
    held = in_one_storage(values, torch.device(bench.device))
    read = sums_in_another_process(share(held))
    bench.found("handles", right=read == {name: value.sum().item() for name, value in values.items()})
    before = bench.reserved()
    del held
    bench.clear()
    emptied = bench.reserved()
    if bench.on_gpu:
        torch.cuda.ipc_collect()
    bench.clear()
    bench.found("handles", held=before, after_empty_cache=emptied, after_ipc_collect=bench.reserved())


def roll_out(bench: Bench) -> None:
    length = 16 if bench.smoke else 128
    config = RolloutConfig(
        num_rollout=1,
        rollout_batch_size=1,
        rollout_max_response_len=length,
        dtype="bfloat16",
        max_running_requests=256,
    )
    engine, seconds = bench.timed(lambda: TransformersEngine(str(model_folder(bench)), config, bench.device))
    bench.found("rollout", load_s=round(seconds, 1), step=type(engine._decoder.step).__name__)
    for rows in (8,) if bench.smoke else (32, 256):
        requests = [
            GenerateRequest((row,), [5 + (row * 7 + place) % 90 for place in range(64)], row, SamplingParams(length))
            for row in range(rows)
        ]
        done, seconds = bench.timed(lambda asked=requests: [one for part in engine.generate(asked) for one in part])  # type: ignore[misc]
        tokens = sum(len(one.response_ids) for one in done)
        bench.found("rollout", rows=rows, tokens_per_s=round(tokens / seconds), s=round(seconds, 2))
    held, seconds = bench.timed(engine.check_batch_invariance)
    bench.found("rollout", batch_invariant=held, check_s=round(seconds, 1))


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "logprobs": measure_log_probs,
    "broadcast": broadcast,
    "handles": read_by_handle,
    "torch": train_torch,
    "deterministic": partial(repeat, deterministic=True),
    "nondeterministic": partial(repeat, deterministic=False),
    "megatron": train_megatron,
    "rollout": roll_out,
    "absent": wait_for_an_absent_receiver,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; all by default")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--models", type=Path, default=Path("build/bench/models"), help="where the model is made")
    options = parse(parser)
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]}: choose from {', '.join(SECTIONS)}")
    bench = Bench(options.device, options.models, options.smoke, options.json)
    failed = False
    for name in options.sections or SECTIONS:
        began = time.perf_counter()
        try:
            SECTIONS[name](bench)
        except Exception as error:
            failed = True
            traceback.print_exc()
            bench.found(name, failed=f"{type(error).__name__}: {error}"[:300])
        bench.found(name, took_s=round(time.perf_counter() - began, 1))
    sys.exit(failed)


if __name__ == "__main__":
    main()
