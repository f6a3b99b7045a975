"""Shared parts of the benchmarks' command lines: `--smoke`, `--json`, and progress messages."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

SMALL_RUN = (
    "rollout.rollout_batch_size=4",
    "rollout.n_samples_per_prompt=4",
    "rollout.rollout_max_response_len=12",
    "eval.eval_interval=null",
    "eval.benchmarks=[]",
)
"""Options that make a run of a recipe short."""

_BEGAN = time.monotonic()


def parse(parser: argparse.ArgumentParser, **smoke: Any) -> argparse.Namespace:
    """Return the parsed arguments. With `--smoke`, unset arguments get the values of `smoke`.

    A smoke run does everything once and briefly: it shows that a benchmark works, and its numbers mean nothing.
    """
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    parser.add_argument("--smoke", action="store_true", help="once and short: does it work? The numbers mean nothing")
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(**smoke)
    return parser.parse_args()


def say(text: str) -> None:
    """Print a progress message with the seconds since the start."""
    print(f"{time.monotonic() - _BEGAN:6.0f} s  {text}", file=sys.stderr, flush=True)
