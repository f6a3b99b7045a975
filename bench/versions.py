"""Bytes and seconds of a stored version of the weights, and whether every version is rebuilt bit for bit.

    python -m bench.versions [--lr 1e-6 1e-5] [--versions 200] [--save-interval 20] [--hidden 768] [--layers 12]
                             [--samples 2] [--tokens 32] [--smoke] [--json FILE]

A Qwen3 model with random weights (12 layers of 768, 100 million parameters) is trained in bfloat16 with float32 master
weights, by PyTorch's AdamW with the defaults of `training` and the gradient of GRPO's loss at its first step, on
windows of the documentation's text with a random advantage each. After every update the weights are written as a sync
step writes them: whole every `--save-interval` versions, and the difference to the version before otherwise, to a
temporary folder, fsync included. A reader rebuilds every version from these files alone, and its bits are compared with
those of the trainer.

`make` is from the trainer's weights to the last file: copying, comparison, compression, SHA-256 and writing. Training
waits for the first of these alone, `copy`.
`apply` is what a reader that holds the version before needs: reading, SHA-256, decompression and the change of the bits
in place. `join` is what another reader needs: the last whole version, and all differences after it. Seconds are CPU
seconds of the process with one thread of PyTorch, except those under `wall`.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.command import parse, say
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.models.folders import load_causal_lm
from cairn.engines.training.checkpoint import in_buckets
from cairn.engines.weights.fingerprint import bits_of
from cairn.engines.weights.layout import StoredVersion
from cairn.engines.weights.versions import FILE_BYTES, VersionWriter, apply, changes, read_version
from cairn.storage.opening import open_store

VOCABULARY = 32_000
DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Result:
    """All versions at one learning rate. Shares are of the bytes of the whole weights; lists have a value a version."""

    lr: float
    parameters: int
    whole_bytes: int
    changed: list[float]
    """Share of the elements whose bits changed."""
    stored: list[float]
    """Share of the bytes that a difference takes."""
    copy: list[float]
    """Seconds for which training waits."""
    make: list[float]
    """Seconds until the files exist, with those of `copy`."""
    make_whole: list[float]
    apply: list[float]
    join: list[float]
    """Beyond the time of reading and verifying the same bytes."""
    an_iteration: float
    """Share of the bytes that an iteration stores on average, whole versions included."""
    rebuilt: int
    """Number of versions that were rebuilt bit for bit."""


def build_model(folder: str, hidden: int, layers: int) -> int:
    """Save a Qwen3 model with random weights; return the number of its parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 192,
        head_dim=64,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return model.num_parameters()


def text_ids() -> np.ndarray:
    """Return token ids of the documentation's words, by their frequency."""
    words = " ".join(path.read_text() for path in sorted(DOCS.glob("*.md"))).split()
    ids = np.unique(words, return_inverse=True)[1]
    order = np.argsort(np.argsort(-np.bincount(ids), kind="stable"))
    return order[ids].astype(np.int32) % VOCABULARY


def train(folder: str, lr: float, versions: int, samples: int, tokens: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights in bfloat16 after every update."""
    model, options, text = load_causal_lm(folder, torch.float32), TrainingConfig(lr=lr), text_ids()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=lr,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
        weight_decay=options.weight_decay,
        fused=True,
    )
    for version in range(versions):
        draw = np.random.default_rng(version)
        windows = [text[start : start + tokens] for start in draw.integers(0, len(text) - tokens, samples)]
        ids = torch.from_numpy(np.stack(windows)).long()
        advantages = torch.from_numpy(draw.normal(size=(samples, 1)).astype(np.float32))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids).logits[:, :-1]
        log_probs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        (-(advantages * log_probs)).mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        yield {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}


def measure(folder: str, parameters: int, lr: float, args: argparse.Namespace) -> Result:
    writer, written = VersionWriter(), list[StoredVersion]()
    held: dict[str, torch.Tensor] = {}
    result = Result(lr, parameters, 0, [], [], [], [], [], [], [], 0.0, 0)
    whole, total, rebuilt, base = 0, 0, 0, None
    with tempfile.TemporaryDirectory() as place:
        store = open_store(place)
        for version, weights in enumerate(train(folder, lr, args.versions, args.samples, args.tokens)):
            due = version % args.save_interval == 0
            began = time.process_time()
            before = None if due else str(base)
            writer.copy(in_buckets(weights.items(), FILE_BYTES), torch.bfloat16, str(version), before)
            result.copy.append(time.process_time() - began)
            files = writer.write(store, f"v{version}")
            seconds, base = time.process_time() - began, version
            size = sum(file.bytes for file in files)
            total += size
            one = StoredVersion(str(version), str(version), tuple(files))
            if due:
                whole, written = size, [one]
                result.make_whole.append(seconds)
                held = read_version(store, written)
            else:
                written.append(one)
                result.make.append(seconds)
                result.stored.append(size / whole)
                began = time.process_time()
                found = changes(store, one, held)
                apply(found, held)
                result.apply.append(time.process_time() - began)
                result.changed.append(sum(len(change.positions) for change in found) / parameters)
            if version % args.save_interval == args.save_interval - 1:
                began = time.process_time()
                joined = read_version(store, written)
                seconds = time.process_time() - began
                result.join.append(seconds - reading(store, written))
                rebuilt -= not same(joined, held)
            rebuilt += same(weights, held)
            say(f"lr {lr:g}: version {version + 1} of {args.versions}, {100 * size / whole:.2f} % of the whole")
    return Result(
        **{**asdict(result), "whole_bytes": whole, "an_iteration": total / args.versions / whole, "rebuilt": rebuilt}
    )


def reading(store: object, versions: Sequence[StoredVersion]) -> float:
    """Return the CPU seconds for reading the files and computing their SHA-256."""
    import hashlib

    began = time.process_time()
    for version in versions:
        for file in version.files:
            hashlib.sha256(store.read(file.path)).hexdigest()  # type: ignore[attr-defined]
    return time.process_time() - began


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Return whether both have the same tensors, bit for bit."""
    return first.keys() == second.keys() and all(
        tensor.dtype == second[name].dtype and torch.equal(bits_of(tensor), bits_of(second[name]))
        for name, tensor in first.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5], help="learning rates")
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--save-interval", type=int, default=20, help="versions from one whole one to the next")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a sample")
    torch.set_num_threads(1)
    args = parse(parser, lr=[1e-4], versions=4, save_interval=2, hidden=192, layers=1, samples=2, tokens=16)

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    table = Table(
        "lr",
        "versions",
        "rebuilt",
        "changed %",
        "difference %",
        "an iteration %",
        "copy s",
        "make s",
        "apply s",
        "join s",
    )
    results = []
    with tempfile.TemporaryDirectory() as folder:
        parameters = build_model(folder, args.hidden, args.layers)
        for lr in args.lr:
            result = measure(folder, parameters, lr, args)
            results.append(result)
            table.add_row(
                f"{lr:g}",
                str(args.versions),
                str(result.rebuilt),
                spread(result.changed, 100),
                spread(result.stored, 100),
                f"{100 * result.an_iteration:.2f}",
                spread(result.copy),
                spread(result.make),
                spread(result.apply),
                spread(result.join),
            )
    console = Console(width=140)
    console.print(f"{parameters:,} parameters, whole {results[0].whole_bytes / 1e6:.0f} MB; median (5 % to 95 %)")
    console.print(table)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=2))


def spread(values: Sequence[float], factor: float = 1.0) -> str:
    low, high = np.quantile(values, [0.05, 0.95])
    return f"{factor * statistics.median(values):.2f} ({factor * low:.2f}–{factor * high:.2f})"


if __name__ == "__main__":
    main()
