"""Predictions for clusters of GPUs: an iteration's time, the driver's load, and the transport of weights, each with its
sources. `python -m bench.pipeline_sim` prints them.

Iteration times come from the simulation of the pipelines. The driver's steps after the last reward are added, and no
iteration is shorter than the CPU time of its driver, most of which runs in one thread at a time. The driver's load
comes from `COSTS`, measured at one and two engines.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.driver_load import Costs, Load, Size
from bench.exchanges import Exchange, exchange_of
from bench.pipeline_sim import Machine, Prediction, predictions
from cairn.configs.catalogue import hardware
from cairn.configs.loader import load
from cairn.configs.schema.run import RunConfig
from cairn.engines.models.quantized import quantization_config
from cairn.engines.plan.tensors import Model
from cairn.engines.rollout.plan import kind_of, served_model
from cairn.flows.plan.subject import planned_model

TOTALS = (8, 64, 1024)
"""GPUs, half of them for rollouts, with an engine on each."""

COSTS = Costs(
    {
        "CPU seconds": {
            "run": 0.0938,
            "shard": 0.0317,
            "engine": 0.00779,
            "sample": 0.000245,
            "million tokens": 0.0344,
        },
        "tail CPU seconds": {"run": 0.0184, "shard": 0.00322, "engine": 0.00204, "sample": 9.29e-05},
        "memory MB": {"run": 375, "shard": 1.41, "million tokens": 27.2},
        "requests": {"run": 17.6, "shard": 5.71},
        "paced requests": {"shard": 4.49},
        "calls": {"run": 11.4, "shard": 0.333, "engine": 4.96},
    }
)
"""Costs that `python -m bench.driver_load` found at one and two engines, on two cores: see bench/README.md.
Repeat it after a change of what the driver does."""

REQUEST = 0.0019
"""CPU seconds of a request to an object store, from the same benchmark. All are counted as the driver's, although
engines make some: an upper bound."""

ONLY_GPUS = (
    "tokens a second that engines and trainer reach in place of the published rates",
    "seconds of a version's transport in place of bytes divided by a link's rate",
    "write-ahead parts of engines whose samples end one by one: between one a shard, as here, and one a sample",
    "memory and CPU time of the driver beside engines on machines of their own",
)


@dataclass(frozen=True)
class Cluster:
    """Predictions for one cluster."""

    size: Size
    load: Load
    pipelines: dict[str, Prediction]


def predicted(machine: Machine, iterations: int, seed: int, costs: Costs = COSTS) -> Cluster:
    """Return the predictions for a machine, with one shard an engine."""
    size = size_of(machine)
    load = costs.load(size)
    load["CPU seconds"] += REQUEST * (load["requests"] + load["paced requests"])
    found = predictions(replace(machine, fixed=load["tail CPU seconds"]), iterations, seed)
    return Cluster(size, load, {name: _not_before(one, load["CPU seconds"]) for name, one in found.items()})


def _not_before(prediction: Prediction, seconds: float) -> Prediction:
    """Return the prediction for iterations that take at least `seconds`."""
    slower = max(1.0, seconds / prediction.seconds)
    return Prediction(
        prediction.seconds * slower,
        prediction.tokens_per_second / slower,
        1 - (1 - prediction.rollout_idle) / slower,
        1 - (1 - prediction.train_idle) / slower,
    )


def size_of(machine: Machine) -> Size:
    """Return the size of an iteration on a machine."""
    mean = float(machine.lengths(np.random.default_rng(0), 100_000).mean())
    shards = min(machine.engines, machine.groups)
    return Size(shards, machine.engines, machine.groups * machine.group_size, round(mean))


def shown(clusters: Mapping[int, Cluster]) -> Table:
    """Return the predictions by number of GPUs side by side, with their sources."""
    found = list(clusters.values())
    table = Table("an iteration", *(f"{total:,} GPUs" for total in clusters), "from")
    table.add_row("engines, shards", *(f"{one.size.engines}, {one.size.shards}" for one in found), "")
    table.add_row("million tokens", *(f"{one.size.millions:.1f}" for one in found), "published lengths")
    for name in found[0].pipelines:
        seconds = (f"{one.pipelines[name].seconds:,.0f}" for one in found)
        table.add_row(f"{name}, seconds", *seconds, "data sheet (decoding), published (training), measured (driver)")
    for figure in found[0].load:
        row = (f"{one.load[figure]:,.1f}" if one.load[figure] < 100 else f"{one.load[figure]:,.0f}" for one in found)
        table.add_row(f"driver: {figure}", *row, "measured at 1 and 2 engines")
    fastest = (min(one.pipelines.values(), key=lambda own: own.seconds).seconds for one in found)
    shares = (f"{one.load['CPU seconds'] / seconds:.0%}" for one, seconds in zip(found, fastest, strict=True))
    table.add_row("driver's share of a core in the fastest", *shares, "both")
    return table


RECIPES = Path(__file__).parents[1] / "configs" / "recipes" / "models"

TRANSPORTED = {
    "Qwen2.5-7B": "verl 2.5 – 3 s for 27B",
    "Qwen3-30B-A3B": "NeMo-RL 0.48 – 0.67 s",
    "Qwen3-235B-A22B": "NeMo-RL 4.6 – 4.9 s; a sparse refit of 247 GB over S3 20 – 26 s",
    "DeepSeek-V3": "NeMo-RL 7.7 – 9.9 s",
    "Kimi-K2-Instruct": "Perplexity 1.3 s (256 to 128 GPUs)",
}
"""Published seconds of a version by recipe (NeMo-RL #2808 and its sparse-delta-refit guide, verl, Perplexity)."""


def exchange(config: RunConfig) -> tuple[Model, Exchange]:
    """Return the trained model of a recipe, and what one version of its weights costs."""
    model, _ = planned_model(config.model.path)
    served, _ = planned_model(served_model(config)[0])
    stored = getattr(served.config, "quantization_config", None)
    scheme = quantization_config(stored) if stored and kind_of(config.rollout.engine).holds_as_stored else None
    return model, exchange_of(model, config.training, config.fleet.update_weight_buffer_size, scheme)


def transports(recipes: Iterable[str] = TRANSPORTED) -> tuple[Table, list[dict[str, Any]]]:
    """Return what a version costs in the layouts of recipes, whole, beside published seconds.

    Operations and bytes are counted from shapes. Seconds are those of the sent bytes over the network card of one GPU,
    because rank 0 broadcasts them where trainer and engines are apart.
    """
    rate = 1e9 * hardware("h100").network_gb_s
    table = Table("recipe", "GB", "operations a rank", "GB sent", f"s at {rate / 1e9:.0f} GB/s", "published")
    rows = []
    for name in recipes:
        _, cost = exchange(load(str(RECIPES / f"{name}.yaml"), []))
        rows.append({"recipe": name, "bytes": cost.nbytes, "operations": cost.collectives, "sent": cost.sent})
        table.add_row(
            name,
            f"{cost.nbytes / 1e9:.1f}",
            f"{cost.collectives:,}",
            f"{cost.sent / 1e9:.1f}",
            f"{cost.sent / rate:.1f}",
            TRANSPORTED[name],
        )
    return table, rows
