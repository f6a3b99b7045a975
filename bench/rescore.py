"""Overhead of `cairn rescore` beyond the graders' own time.

    python -m bench.rescore [--graders exact_match math] [--groups 1000] [--tokens 256] [--rounds 3] [--smoke]
                            [--json FILE]

Writes a ledger of `--groups` groups of eight responses with `--tokens` tokens each, in iterations of a hundred groups
with two shards, and grades it again with

  exact_match   cheap: reading, transfer and counting dominate
  math          computer algebra, about a millisecond a sample

in each of these ways, alternating: `own` is the loop `for sample in samples: grade(sample)` in a process with the
samples in memory and the grader imported; `rescore` is the function behind the command, in a new process, without
Python's start and imports; `command` is `cairn rescore`, with both. Medians of `--rounds`. Target: rescore in
1.2 × own + 1 s.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.command import parse, say
from bench.ledger import config_of
from bench.million_samples import GROUP, RUN, write

GRADERS = ("exact_match", "math")
GROUPS = 100
"""Number of groups in an iteration."""
_OWN = """
import importlib, sys, time
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.opening import open_store
from cairn.tasks.rewards.sample import Sample
ledger = Ledger.open(open_store(sys.argv[1]), sys.argv[2])
commits = [c for i in ledger.iterations() for c in ledger.commits(i) if c.step is Step.ROLLOUT]
rows = [row for c in commits for row in read_table(ledger.store, c.run, c.outputs[0]).to_pylist()]
samples = [Sample(row["response_text"], row["label"]) for row in rows]
grader = importlib.import_module(f"cairn.tasks.rewards.{sys.argv[3]}")
began = time.perf_counter()
for sample in samples:
    grader.grade(sample)
print(time.perf_counter() - began)
"""
_RESCORE = """
import sys, time
from cairn.flows.driver.validation import load_tokenizer
from cairn.flows.history.rescore import grader_override, rescore
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
began = time.perf_counter()
figures, _ = rescore(Ledger.open(open_store(sys.argv[1]), sys.argv[2]), None, [grader_override(sys.argv[3])])
print(time.perf_counter() - began)
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graders", nargs="+", choices=GRADERS, default=GRADERS)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=256, help="of a response")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parse(parser, graders=["math"], groups=4, tokens=16, rounds=1)
    with tempfile.TemporaryDirectory(prefix="bench-rescore-") as scratch:
        folder = Path(scratch)
        say(f"writing {arguments.groups * GROUP:,} samples")
        iterations = max(1, arguments.groups // GROUPS)
        _write(folder, iterations, arguments.groups // iterations * GROUP, arguments.tokens)
        found = {name: measure(folder, name, arguments.rounds) for name in arguments.graders}
    table = Table("grader", "own (s)", "rescore (s)", "command (s)", "1.2 × own + 1 s")
    for name, seconds in found.items():
        bound = 1.2 * seconds["own"] + 1
        table.add_row(name, *(f"{value:.2f}" for value in (*seconds.values(), bound)))
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


def measure(folder: Path, grader: str, rounds: int) -> dict[str, float]:
    """Return the median seconds of each way."""
    ways: dict[str, Callable[[], float]] = {
        "own": lambda: _timed(_OWN, folder, grader),
        "rescore": lambda: _timed(_RESCORE, folder, grader),
        "command": lambda: _command(folder, grader),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        say(f"{grader}, round {number + 1} of {rounds}")
        for way, measured in ways.items():
            taken[way].append(measured())
    return {way: statistics.median(seconds) for way, seconds in taken.items()}


def _write(folder: Path, iterations: int, samples: int, tokens: int) -> None:
    """Write the ledger, with a tokenizer where the run's model would be: the graders read whole samples."""
    from examples.quickstart.model import build_tokenizer

    model = folder / "model"
    build_tokenizer([str(number) for number in range(50_000)]).save_pretrained(model)
    (model / "config.json").write_text("{}")
    config = config_of(iterations).model_dump(mode="json")
    config["model"]["path"] = str(model)
    write(folder, type(config_of(1)).model_validate(config), iterations, samples, tokens)


def _timed(code: str, folder: Path, grader: str) -> float:
    """Run the code in a new process and return the number that it prints."""
    run = subprocess.run(
        [sys.executable, "-c", code, str(folder), RUN, grader], check=True, capture_output=True, text=True
    )
    return float(run.stdout.split()[-1])


def _command(folder: Path, grader: str) -> float:
    began = time.perf_counter()
    subprocess.run(
        [Path(sys.executable).with_name("cairn"), "rescore", RUN, "--reward", grader, "--store", str(folder)],
        env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
