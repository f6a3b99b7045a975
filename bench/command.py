"""What the benchmarks' command lines have in common: `--smoke`, `--json`, and a word on how far they are."""

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
"""Options that make a run of a recipe a short one."""

_BEGAN = time.monotonic()


def parse(parser: argparse.ArgumentParser, **smoke: Any) -> argparse.Namespace:
    """The arguments. With `--smoke` those that are not given take the values of `smoke`, by which everything is done
    once, and short: it shows that a benchmark works, and its numbers mean nothing."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    parser.add_argument("--smoke", action="store_true", help="once and short: does it work? The numbers mean nothing")
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(**smoke)
    return parser.parse_args()


def say(text: str) -> None:
    """How far it is, with the seconds since it began."""
    print(f"{time.monotonic() - _BEGAN:6.0f} s  {text}", file=sys.stderr, flush=True)
