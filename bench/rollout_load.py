"""Load of the driver while engines generate: its CPU time and memory in the rollout steps of one iteration, or in an
evaluation.

    python -m bench.rollout_load [--samples 1024] [--length 32768] [--shards 8] [--engines 2] [--routing LAYERS,TOP_K]
    python -m bench.rollout_load --evaluation          one benchmark of as many samples, graded by a function
    python -m bench.rollout_load --against PATH        the same with the code of another checkout, in turn

The engines are synthetic (bench/synthetic_engines.py) and answer at once; they are actors of Ray, and samples go to a
store on local files. Memory is the private memory of the driver's process, its greatest value during the steps. The
digest is that of the first shard's samples without what was measured: equal code must give equal ones.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import synthetic_engines
from bench.command import parse, say

DEADLINE = 1800


def private() -> int:
    """Return the bytes of private memory of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


class Peak:
    """Greatest private memory while the context is open."""

    def __enter__(self) -> "Peak":
        self.bytes, self._over = private(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.bytes = max(self.bytes, private())


def drive(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run the rollout steps in this process, and return what they took."""
    import cairn.engines.models.routing
    from cairn.configs.schema.run import RunConfig
    from cairn.engines.fleet.fleet import Fleet
    from cairn.flows.driver.sources import Sources, open_graders
    from cairn.flows.iteration import plan_round
    from cairn.storage.ledger.leases import Outcome
    from cairn.storage.ledger.ledger import Ledger
    from cairn.storage.opening import open_store
    from cairn.tasks.evaluation.evaluate import evaluate
    from cairn.tasks.generation.rollout import rollout
    from cairn.tasks.steps import rules

    cairn.engines.models.routing.replay_problems = lambda *_: iter(())  # the folder's model has no experts
    synthetic_engines.install()
    config = RunConfig.model_validate(options)
    sources = Sources.open(config)
    with ExitStack() as stack:
        ledger = Ledger.create(open_store(str(folder / "store")), "load", config, sources.digests, rules=rules(config))
        stack.callback(ledger.acquire().release, Outcome.STOPPED)
        starting = Fleet.start(
            config, name="rollout-load", total_steps=1, model_digests=sources.digests, samples_only=True
        )
        fleet = stack.enter_context(starting)
        graders = open_graders(config, stack, None, lambda: fleet.scorer)
        run = sources.context(config, ledger, lambda: fleet, graders, lambda event: None)
        for engine in fleet.rollout:
            engine.health()
        before, cpu, began = private(), time.process_time(), time.perf_counter()
        shards = plan_round(run, 0, None, None, 0)
        with Peak() as peak, ThreadPoolExecutor(len(shards)) as pool:
            if config.eval.benchmarks:
                commits = [evaluate(run, 0, one.name, None, name=one.name) for one in config.eval.benchmarks]
            else:
                commits = list(pool.map(lambda shard: rollout(run, 0, shard[0], None, [], [], **shard[1]), shards))
        return {
            "driver CPU seconds": time.process_time() - cpu,
            "wall seconds": time.perf_counter() - began,
            "private MB before": before / 1e6,
            "most private MB": peak.bytes / 1e6,
            "MB of snapshots": sum(file.bytes for commit in commits for file in commit.outputs) / 1e6,
            "digest": str(commits[0].table.content)[:12],
        }


def measure(arguments: argparse.Namespace, checkout: Path) -> dict[str, Any]:
    """Return the measurements with the code of a checkout."""
    from bench.scale import config_of, revision, search_path, write_assets  # not in the other process

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True, dir=arguments.scratch) as name:
        folder = Path(name)
        write_assets(folder)
        options = config_of(arguments, folder)
        if arguments.evaluation:
            benchmark = {
                "name": "heldout",
                "path": f"{options['data']['path']}@[0:{arguments.samples // arguments.group}]",
                "n_samples_per_eval_prompt": arguments.group,
                "max_response_len": arguments.length,
            }
            options["eval"] = {"eval_interval": 1, "benchmarks": [benchmark]}
        routes = {} if arguments.routing is None else {synthetic_engines.ROUTES: arguments.routing}
        with search_path(checkout) as path:
            subprocess.run(
                [sys.executable, "-P", "-m", "bench.rollout_load", "--drive", json.dumps(options)],
                env={**os.environ, **routes, "PYTHONPATH": path},
                cwd=folder,
                stdout=sys.stderr,
                timeout=DEADLINE,
                check=True,
            )
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return {"checkout": f"{checkout.name} {revision(checkout)}", **found}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1024, help="samples in all")
    parser.add_argument("--length", type=int, default=32_768, help="tokens of each response")
    parser.add_argument("--shards-per-round", type=int, default=8, help="rollout steps")
    parser.add_argument("--engines", type=int, default=2, help="rollout engines")
    parser.add_argument("--routing", metavar="LAYERS,TOP_K", help="record the experts of each token: routing replay")
    parser.add_argument("--evaluation", action="store_true", help="an evaluation instead of rollout steps")
    parser.add_argument("--scratch", type=Path, help="folder for temporary files")
    parser.add_argument("--against", type=Path, metavar="PATH", help="measure another checkout too")
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    parser.set_defaults(group=8, iterations=1, shards=False, score=False, ranks=1)
    arguments = parse(parser, samples=16, length=64, shards_per_round=2)
    if arguments.drive is not None:
        Path("found.json").write_text(json.dumps(drive(json.loads(arguments.drive), Path.cwd())))
        return
    from bench.scale import HERE

    found = []
    for checkout in [*([arguments.against.resolve()] if arguments.against else []), HERE]:
        say(str(checkout))
        found.append(measure(arguments, checkout))
    table = Table(
        "an evaluation" if arguments.evaluation else "rollout steps of an iteration",
        *(one["checkout"] for one in found),
    )
    for name in list(found[0])[1:]:
        table.add_row(name, *(f"{one[name]:,.1f}" if isinstance(one[name], float) else one[name] for one in found))
    Console(width=100).print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
