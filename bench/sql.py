"""Time of a query on a million samples: SQL over 1,000 iterations on local files.

    python -m bench.sql [--iterations 1000] [--samples 1000] [--tokens 16] [--questions 5] [--rounds 3] [--folder DIR]
                        [--smoke] [--json FILE]

Writes a ledger of `--iterations` iterations of `--samples` samples of `--tokens` tokens, with nine commits each, into a
temporary folder (or `--folder`, which is retained and reused), and queries it, each time in a new process:

  first     without an index: every commit that the query needs is read
  second    with the index that the first has written
  command   `cairn sql`, with the index: includes Python's start, imports and printing

The files are in the page cache. Medians of `--rounds`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.command import parse, say
from bench.ledger import config_of
from bench.million_samples import RUN, write

QUESTIONS = {
    "mean reward by iteration, of `rewards`": "SELECT iteration, avg(reward) FROM rewards GROUP BY 1",
    "the same of `samples`": "SELECT iteration, avg(reward) FROM samples GROUP BY 1",
    "mean loss by 100 iterations": "SELECT iteration // 100, avg(metrics['loss']) FROM steps GROUP BY 1",
    "what became of groups": "SELECT disposition, count(*) FROM groups GROUP BY 1",
    "tokens of one iteration": "SELECT avg(log_prob), avg(ratio), avg(advantage) FROM tokens WHERE iteration = {last}",
}
_ASK = """
import sys, time
from cairn.storage.query import open_query
from cairn.storage.opening import open_store
query = open_query(open_store(sys.argv[1]))
began = time.perf_counter()
rows = query.sql(sys.argv[2]).num_rows
print(time.perf_counter() - began, rows)
"""


def query_seconds(folder: Path, text: str, cache: Path) -> float:
    """Return the seconds of a query in a new process, without Python's start and imports."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    answer = subprocess.run(
        [sys.executable, "-c", _ASK, str(folder), text], env=environment, check=True, capture_output=True, text=True
    ).stdout
    return float(answer.split()[0])


def command(cache: Path, *arguments: str) -> float:
    """Return the seconds of a `cairn` command."""
    began = time.perf_counter()
    subprocess.run(
        [Path(sys.executable).with_name("cairn"), *arguments],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)}, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return time.perf_counter() - began


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1000, help="of an iteration")
    parser.add_argument("--tokens", type=int, default=16, help="of a response")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="the first of them alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="of a ledger that is kept, and used again")
    arguments = parse(parser, iterations=4, samples=32, questions=1, rounds=1)
    with tempfile.TemporaryDirectory(prefix="bench-sql-") as scratch:
        folder = arguments.folder or Path(scratch) / "store"
        if not (folder / "runs" / RUN).exists():
            say(f"writing {arguments.iterations * arguments.samples:,} samples")
            write(folder, config_of(arguments.iterations), arguments.iterations, arguments.samples, arguments.tokens)
        questions = dict(islice(QUESTIONS.items(), arguments.questions))
        found = measure(questions, folder, Path(scratch), arguments.iterations - 1, arguments.rounds)
    table = Table("question", *next(iter(found.values())))
    for question, seconds in found.items():
        table.add_row(question, *(f"{value:.2f}" for value in seconds.values()))
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


def measure(
    questions: Mapping[str, str], folder: Path, scratch: Path, last: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Return the median seconds of each query in each way."""
    found = {}
    for question, template in questions.items():
        say(question)
        text = template.format(last=last)
        taken: dict[str, list[float]] = {"first": [], "second": [], "command": []}
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(dir=scratch) as cache:
                taken["first"].append(query_seconds(folder, text, Path(cache)))
                taken["second"].append(query_seconds(folder, text, Path(cache)))
                taken["command"].append(command(Path(cache), "sql", text, "--store", str(folder), "--csv"))
        found[question] = {way: statistics.median(seconds) for way, seconds in taken.items()}
    return found


if __name__ == "__main__":
    main()
