"""Cost of batch invariance for the transformers engine: the engine with and without its measures, alternating.

    python -m bench.invariance [--hidden 64 512] [--batch 8 64 256] [--rounds 5] [--smoke] [--json FILE]

"Without" exists only for this benchmark: prompts of a batch share one prefill whatever their lengths, padded to the
longest; no padding rows and no minimum number of rows; attention over the existing positions, not up to the next
multiple of 16. Everything else is the same code, and both sides generate the same prompts with the same seeds, on one
thread: a run uses further cores with further engines, which costs no invariance. The models, prompts and the workloads
`fixed` and `groups` are those of bench/rollout.py.

Speeds are tokens per CPU second, the median of the rounds; the order of the sides alternates with every round.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import transformers
from rich.console import Console
from rich.table import Table

from bench.command import parse, say
from bench.rollout import NEW_TOKENS, build_model, make_requests, run_engine
from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.rollout.transformers.decoder import Decoder
from cairn.engines.rollout.transformers.engine import TransformersEngine


class FreeDecoder(Decoder):
    """A decoder without the measures for batch invariance."""

    longest = 0
    """Length of the longest prompt."""

    def num_rows(self, size: int) -> int:
        return size

    def prefill_length(self, tokens: np.ndarray) -> int:
        return self.longest - 1


def build_engine(path: Path, batch_size: int, decoder_type: type[Decoder] = Decoder) -> TransformersEngine:
    """Return an engine with one thread."""
    config = RolloutConfig(
        num_rollout=1, rollout_batch_size=1, rollout_max_response_len=NEW_TOKENS, max_running_requests=batch_size
    )
    engine = TransformersEngine(str(path), config)
    if decoder_type is not Decoder:
        engine._decoder = decoder_type(engine._model, config.max_running_requests)
    return engine


def measure(path: Path, workload: str, batch_size: int, rounds: int) -> dict[str, list[float]]:
    """Return the tokens per CPU second of every counted turn, with the measures and without."""
    requests = make_requests(workload, batch_size)
    engines = {"with": build_engine(path, batch_size), "without": build_engine(path, batch_size, FreeDecoder)}
    speeds: dict[str, list[float]] = {side: [] for side in engines}
    for turn in range(rounds + 1):
        for side in list(engines) if turn % 2 else reversed(engines):
            began = time.process_time()
            tokens = run_engine(engines[side], requests)
            if turn:
                speeds[side].append(tokens / (time.process_time() - began))
    return speeds


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 512], help="hidden sizes of the models")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64, 256], help="samples per call")
    parser.add_argument("--rounds", type=int, default=5, help="counted turns of each side")
    arguments = parse(parser, hidden=[64], batch=[8], rounds=1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results = []
    table = Table("hidden", "batch", "workload", "with, tokens/s", "without, tokens/s", "cost")
    for hidden in arguments.hidden:
        with tempfile.TemporaryDirectory() as folder:
            path = build_model(hidden, Path(folder))
            for batch in arguments.batch:
                for workload in ("fixed", "groups"):
                    say(f"hidden {hidden}, batch {batch}, {workload}")
                    speeds = measure(path, workload, batch, arguments.rounds)
                    cost = 1 - statistics.median(a / b for a, b in zip(*speeds.values(), strict=True))
                    results.append({"hidden": hidden, "batch": batch, "workload": workload, "speeds": speeds})
                    medians = [f"{statistics.median(values):,.0f}" for values in speeds.values()]
                    table.add_row(str(hidden), str(batch), workload, *medians, f"{100 * cost:+.1f} %")
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
