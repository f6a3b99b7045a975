"""Load of a driver by the size of its run: fitted to small runs with synthetic engines, and held to larger ones.

    python -m bench.driver_load [--large 64x16 …] [--iterations 4] [--smoke] [--json FILE]
    python -m bench.driver_load --measured FILE … [--json FILE]        results of bench.scale or of this benchmark

A run of `bench.scale` at each of `SMALL` sizes gives what one shard, engine, sample and token cost the driver: the
nonnegative costs with the least relative deviations. Then the load of larger runs, none of which is in the fit, is
predicted and measured. `bench.pipeline_sim` predicts clusters with these costs.

  CPU       seconds of the driver's process, for the iteration itself and by shards, engines, samples and tokens
  tail      of these, those of the steps after the last reward: filter, advantage, score, train and sync, one after the
            other
  memory    the most private memory, by shards and tokens
  requests  all but the renewals and checks of leases, and the parts of write-ahead logs. Reads of the run's pages may
            fall into the next iteration
  paced     those requests, whose number depends on the time, by shards
  calls     of actors, without checks of health, by shards and engines

The runs write to local files. What a request to an object store costs in addition is measured by itself: creations,
reads, checks and deletions of a commit's size, by 16 threads, on an S3 server.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import scale
from bench.command import parse, say
from cairn.storage.opening import open_store
from tests.s3 import moto_server

BESIDE = ("rollout", "reward")
"""Steps beside which engines generate."""

PACED = ("lease", "write-ahead")
"""Objects whose requests depend on the time."""


@dataclass(frozen=True)
class Size:
    """Size of an iteration."""

    shards: int
    engines: int
    samples: int
    length: int
    """Tokens of each response."""

    @property
    def millions(self) -> float:
        """Millions of response tokens."""
        return self.samples * self.length / 1e6

    def columns(self) -> dict[str, float]:
        """Return what load may be proportional to, by name."""
        return {
            "run": 1.0,
            "shard": self.shards,
            "engine": self.engines,
            "sample": self.samples,
            "million tokens": self.millions,
        }


SMALL = (
    Size(1, 1, 16, 64),
    Size(2, 2, 16, 64),
    Size(4, 1, 16, 64),
    Size(8, 2, 16, 64),
    Size(2, 2, 512, 64),
    Size(2, 2, 32, 32_768),
    Size(2, 1, 128, 32_768),
    Size(8, 2, 64, 8192),
)
"""Sizes at one and two engines, to which the costs are fitted."""

SMOKE = (Size(1, 1, 8, 16), Size(2, 2, 8, 16), Size(4, 1, 8, 16))

ALL = ("run", "shard", "engine", "sample", "million tokens")

_REWEIGHTED = 50

READS = {
    "CPU seconds": ALL,
    "tail CPU seconds": ALL,
    "memory MB": ("run", "shard", "million tokens"),
    "requests": ("run", "shard"),
    "paced requests": ("shard",),
    "calls": ("run", "shard", "engine"),
}
"""Figures of a load, and what each may be proportional to."""

Load = dict[str, float]
"""Figures of an iteration, by the names of `READS`."""


@dataclass(frozen=True)
class Costs:
    """What each part of a size adds to each figure of the load."""

    each: Mapping[str, Mapping[str, float]]

    @classmethod
    def fitted(cls, measured: Sequence[tuple[Size, Load]]) -> "Costs":
        """Return the costs with the least relative deviations from measured iterations; none is negative."""
        each = {}
        for figure, names in READS.items():
            rows = np.array([[size.columns()[name] for name in names] for size, _ in measured], float)
            wanted = np.array([load[figure] for _, load in measured], float)
            scale_by = np.maximum(wanted, 1e-9)
            each[figure] = dict(zip(names, _least_deviations(rows / scale_by[:, None], wanted / scale_by), strict=True))
        return cls(each)

    def load(self, size: Size) -> Load:
        """Return the predicted load of an iteration."""
        columns = size.columns()
        return {
            figure: sum(cost * columns[name] for name, cost in costs.items()) for figure, costs in self.each.items()
        }


def _least_deviations(matrix: np.ndarray, wanted: np.ndarray) -> list[float]:
    """Return nonnegative coefficients with the least sum of absolute deviations, by reweighted least squares. A few
    iterations that another process slowed down do not change them."""
    found = np.array(_nonnegative(matrix, wanted))
    for _ in range(_REWEIGHTED):
        weights = np.maximum(np.abs(matrix @ found - wanted), 1e-4) ** -0.5
        found = np.array(_nonnegative(matrix * weights[:, None], wanted * weights))
    return [float(value) for value in found]


def _nonnegative(matrix: np.ndarray, wanted: np.ndarray) -> list[float]:
    """Return least-squares coefficients, none of them negative: columns whose coefficients would be are left out, the
    most negative first."""
    norms = np.maximum(np.linalg.norm(matrix, axis=0), 1e-30)
    found, used = np.zeros(matrix.shape[1]), list(range(matrix.shape[1]))
    while used:
        solved = np.linalg.lstsq(matrix[:, used] / norms[used], wanted, rcond=None)[0]
        if (solved >= 0).all():
            found[used] = solved / norms[used]
            break
        used.pop(int(solved.argmin()))
    return [float(value) for value in found]


def load_of(iteration: Mapping[str, Any]) -> Load:
    """Return the load of an iteration that `bench.scale` measured."""
    paced = sum(count for name, count in iteration["requests"].items() if name.endswith(PACED))
    return {
        "CPU seconds": iteration["cpu"].get("driver", 0.0),
        "tail CPU seconds": sum(own["cpu"] for step, own in iteration["steps"].items() if step not in BESIDE),
        "memory MB": iteration["peak"]["private"] / 1e6,
        "requests": sum(iteration["requests"].values()) - paced,
        "paced requests": paced,
        "calls": sum(count for name, count in iteration["calls"].items() if name != "health"),
    }


def loads_of(parameters: Mapping[str, Any], measured: Mapping[str, Any]) -> list[tuple[Size, Load]]:
    """Return the loads of a run's iterations in the middle: the first warms up, and the last has a checkpoint."""
    size = Size(*(parameters[name] for name in ("shards_per_round", "engines", "samples", "length")))
    return [(size, load_of(one)) for one in measured["run"]["iterations"][1:-1]]


def run(size: Size, iterations: int) -> list[tuple[Size, Load]]:
    """Measure a run of this size."""
    say(f"{size}")
    parameters = {**asdict(size), "shards_per_round": size.shards, "group": 2 if size.samples > size.shards else 1}
    arguments = argparse.Namespace(
        **parameters | {"shards": False}, alone=None, ranks=1, iterations=iterations, routing=None, score=False,
        store="local", scratch=None, keep=None,
    )  # fmt: skip
    return loads_of(parameters, scale.measure(arguments, scale.HERE))


def request_seconds(count: int) -> float:
    """Return the CPU seconds of a request to an object store, the mean over `4 * count` requests."""
    with moto_server() as server, patch.dict(os.environ, server.env):
        store = open_store(f"s3://{server.new_bucket()}/requests")
        store.write("first", b"opens the connections")

        def request(number: int) -> None:
            path = f"{number}.json"
            store.create(path, f"{number:08000d}".encode())
            store.read(path)
            store.exists(path)
            store.delete(path)

        began = time.process_time()
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(request, range(count)))
        return (time.process_time() - began) / (4 * count)


def compare(costs: Costs, held: Sequence[tuple[Size, Load]]) -> tuple[Table, list[dict[str, Any]]]:
    """Return predictions beside measurements of sizes that are not in the fit: means over iterations of a size."""
    table = Table("shards × engines × samples × tokens", "", "predicted", "measured", "off by")
    rows = []
    for size in dict.fromkeys(size for size, _ in held):
        loads, predicted = [load for own, load in held if own == size], costs.load(size)
        for figure in READS:
            measured = float(np.mean([load[figure] for load in loads]))
            off = predicted[figure] / measured - 1 if measured else 0.0
            rows.append({"size": asdict(size), "figure": figure, "predicted": predicted[figure], "measured": measured})
            name = f"{size.shards} × {size.engines} × {size.samples} × {size.length:,}"
            table.add_row(name, figure, f"{predicted[figure]:,.1f}", f"{measured:,.1f}", f"{off:+.0%}")
    return table, rows


def shown(costs: Costs) -> Table:
    """Return a table of the costs."""
    names = list(Size(1, 1, 1, 1).columns())
    table = Table("an iteration, for each", *names)
    for figure, own in costs.each.items():
        table.add_row(figure, *(f"{own[name]:.3g}" if name in own else "" for name in names))
    return table


def parsed(text: str) -> Size:
    """Return the size that `SHARDSxENGINES[xSAMPLES[xLENGTH]]` describes."""
    shards, engines, *rest = map(int, text.split("x"))
    samples, length = [*rest, *(2 * shards, 64)[len(rest) :]]
    return Size(shards, engines, samples, length)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", type=parsed, nargs="*", metavar="SHARDSxENGINES[xSAMPLES[xLENGTH]]",
                        default=[parsed("64x16")], help="sizes that are predicted")  # fmt: skip
    parser.add_argument(
        "--iterations", type=int, default=4, help="of each run, of which the first and last do not count"
    )
    parser.add_argument("--measured", type=Path, nargs="+", metavar="FILE", help="measure nothing, read these results")
    arguments = parse(parser, iterations=3, large=[parsed("24x4x48x16")])
    small: list[tuple[Size, Load]] = []
    held: list[tuple[Size, Load]] = []
    if arguments.measured:
        for file in arguments.measured:
            content = json.loads(file.read_text())
            if "small" in content:
                small += [(Size(**one["size"]), one["load"]) for one in content["small"]]
                held += [(Size(**one["size"]), one["load"]) for one in content["held"]]
            else:
                held += loads_of(content["parameters"], content["measured"][-1])
    else:
        small = [one for size in (SMOKE if arguments.smoke else SMALL) for one in run(size, arguments.iterations)]
        held = [one for size in arguments.large for one in run(size, arguments.iterations)]
    costs = Costs.fitted(small)
    table, rows = compare(costs, held)
    console = Console(width=120)
    console.print(shown(costs))
    console.print(table)
    seconds = request_seconds(20 if arguments.smoke else 200)
    console.print(f"a request to an object store: {1e3 * seconds:.1f} ms of CPU time")
    if arguments.json is not None:
        kept = {
            name: [{"size": asdict(size), "load": load} for size, load in loads]
            for name, loads in (("small", small), ("held", held))
        }
        arguments.json.write_text(
            json.dumps({"costs": costs.each, "request_seconds": seconds, "compared": rows, **kept}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
