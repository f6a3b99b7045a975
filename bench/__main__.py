"""Run all benchmarks one after the other, each in a fresh process: `python -m bench [--smoke]`, called by `make bench`.

    build/bench/NAME.json       all numbers of each benchmark
    build/bench/machine.json    the machine, and its other load during the measurement

Takes about half an hour on two idle cores. The Ceph gateway of two of them needs Debian or Ubuntu. See bench/README.md
for what each measures.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

RESULTS = Path("build/bench")
DEADLINE = 1800
"""Seconds that one benchmark may take."""

BENCHMARKS = {
    "snapshots": "bench.snapshots",
    "versions": "bench.versions",
    "orchestration": "bench.orchestration",
    "rollout": "bench.rollout --rounds 3",
    "training": "bench.training --rounds 2",
    "sync": "bench.sync",
    "sglang": "bench.sglang",
    "megatron": "bench.megatron --hidden 256",
    "logits": "bench.logits",
    "seeds": "bench.bare_loop --seeds 42 1 2 3 4",
    "learning": "bench.learning --seeds 1",
    "durability": "bench.durability",
    "cpu": "bench.cpu",
    "round_trips": "bench.round_trips",
    "scale": "bench.scale --tokens --samples 128",
    "driver_load": "bench.driver_load",
    "scale_rollout": "bench.scale --rollout --samples 128",
    "pipeline": "bench.pipeline --seeds 42",
    "pipeline_sim": "bench.pipeline_sim",
    "write_ahead": "bench.write_ahead",
    "invariance": "bench.invariance",
    "episodes": "bench.episodes",
    "ledger": "bench.ledger",
    "sql": "bench.sql",
    "report": "bench.report",
    "board": "bench.board",
    "rescore": "bench.rescore",
    "start": "bench.start",
    "recovery": "bench.recovery",
    "checkpoint": "bench.checkpoint",
    "trl": "bench.trl",
}


def main() -> None:
    """Run all benchmarks; exit non-zero, at the end, if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="each once and short: do they work?")
    smoke = ["--smoke"] if parser.parse_args().smoke else []
    RESULTS.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "examples.quickstart.build"], check=True)
    loads, failed = {}, []
    for name, module in BENCHMARKS.items():
        arguments = ["-m", *shlex.split(module), "--json", str(RESULTS / f"{name}.json"), *smoke]
        loads[name] = os.getloadavg()[0]
        print(f"\n$ python {shlex.join(arguments)}    (load {loads[name]:.1f})", flush=True)
        began = time.monotonic()
        if subprocess.run([sys.executable, *arguments], timeout=DEADLINE).returncode != 0:
            failed.append(name)
        print(f"{time.monotonic() - began:.0f} s", flush=True)
    machine = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in ("torch", "transformers", "ray", "prefect", "pyarrow")},
        "load before each": loads,
    }
    (RESULTS / "machine.json").write_text(json.dumps(machine, indent=1) + "\n")
    print(f"\nall numbers are in {RESULTS}/")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; the messages stand above")


def processor() -> str:
    """Return the processor's name, as Linux reports it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
