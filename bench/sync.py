"""Seconds to transfer new weights to an SGLang server, by transport and by the number of bytes.

    python -m bench.sync [--hidden 64 512] [--rounds 5] [--smoke] [--json FILE]
    python -m bench.sync --count RECIPE [RECIPE …] [--set rollout.model_path=Qwen3-30B-A3B-FP8]

With --count nothing is transferred: for the layouts of recipes, from shapes alone, the collective operations and bytes
of one version, whatever the number of rollout engines, and the operations that slime and NeMo-RL need. Of the bytes,
GB are those of all weights in the training's number format, and GB sent those that leave the trainer.

A fleet of one training rank and one server, without GPUs, on tiny Qwen3 models of those hidden sizes (2 layers, fp32).
The transports alternate; the first turn of each is not counted. A turn is publication and update: the weights stored,
the server idle, the weights loaded, its cache flushed, the new version served. The folder of the transport `disk` is on
--disk, the machine's temporary folder by default.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import transformers
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from bench.clusters import exchange
from bench.command import parse, say
from bench.exchanges import nemo_rl_collectives, slime_collectives
from bench.rollout import build_model
from cairn.configs.loader import load
from cairn.configs.schema.operations import FleetConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.fleet.handles import UPDATING
from cairn.engines.fleet.weights.transports import transport_of
from cairn.engines.fleet.weights.verification import verify_log_probs
from cairn.engines.rollout.base import RolloutEngine

TRANSPORTS = ("tensor", "disk", "distributed")
START_TIMEOUT = 600.0


def run_config(model: Path) -> RunConfig:
    """Return the configuration of a fleet of one engine and one rank; no data is read."""
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"path": "none.jsonl"},
            "rollout": {
                "engine": "sglang",
                "num_rollout": 1,
                "rollout_batch_size": 1,
                "rollout_max_response_len": 16,
                "max_running_requests": 16,
                "sglang": {"max_total_tokens": 4096},
            },
            "training": {"num_threads": 1},
            "fleet": {"start_timeout": START_TIMEOUT},
        }
    )


def measure(config: RunConfig, fleet: Fleet, disk: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every counted turn."""
    (engine,) = fleet.rollout
    transports = {}
    for name in TRANSPORTS:
        options = FleetConfig(
            update_weight_transport=name, update_weight_disk_dir=str(disk) if name == "disk" else None
        )
        transports[name] = transport_of(options, fleet.training, load_timeout=START_TIMEOUT, maps_gpu_memory=False)
    seconds: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
    for turn in range(rounds + 1):
        say(f"turn {turn} of {rounds}")
        for name in TRANSPORTS if turn % 2 else reversed(TRANSPORTS):
            began = time.perf_counter()
            publication = transports[name].store(0)
            engine.call(UPDATING, RolloutEngine.begin_weight_update, 0).result()
            transports[name].send(0, publication, [engine])
            engine.call(UPDATING, RolloutEngine.end_weight_update).result()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    verify_log_probs(fleet.training, engine, config)
    return seconds


def size_of(model: Path) -> int:
    """Return the bytes of the weights in float32, as they are transferred; tied ones count once."""
    with safe_open(model / "model.safetensors", framework="np") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118


def count(recipes: list[str], overrides: list[str]) -> None:
    """Print what a version costs in the layouts of recipes."""
    table = Table("recipe", "GB", "tensors", "buckets", "collectives", "GB sent", "slime", "NeMo-RL")
    for recipe in recipes:
        config = load(recipe, overrides)
        model, cost = exchange(config)
        table.add_row(
            Path(recipe).stem,
            f"{cost.nbytes / 1e9:.1f}",
            f"{cost.weights:,}",
            f"{cost.buckets:,}",
            f"{cost.collectives:,}",
            f"{cost.sent / 1e9:.1f}",
            f"{slime_collectives(model, config.training):,}",
            f"{nemo_rl_collectives(model, config.training):,}",
        )
    Console().print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 512], help="hidden sizes of the models")
    parser.add_argument("--rounds", type=int, default=5, help="counted turns of each transport")
    parser.add_argument("--disk", type=Path, help="folder in which model folders are written")
    parser.add_argument("--count", nargs="+", metavar="RECIPE", help="count the operations in the layouts of recipes")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="options of the recipes")
    arguments = parse(parser, hidden=[64], rounds=1)
    if arguments.count:
        count(arguments.count, arguments.set)
        return
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results = []
    table = Table("hidden", "MB", *(f"{transport}, s (MB/s)" for transport in TRANSPORTS))
    for hidden in arguments.hidden:
        with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
            model = build_model(hidden, Path(folder, "model"))
            say(f"hidden {hidden}: starting a server and a training rank")
            config = run_config(model)
            with Fleet.start(config, name="sync", total_steps=1) as fleet:
                seconds = measure(config, fleet, Path(folder), arguments.rounds)
            megabytes = size_of(model) / 1e6
            results.append({"hidden": hidden, "megabytes": megabytes, "seconds": seconds})
            medians = [statistics.median(seconds[transport]) for transport in TRANSPORTS]
            table.add_row(str(hidden), f"{megabytes:.1f}", *(f"{s:.3f} ({megabytes / s:,.0f})" for s in medians))
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
