"""Results of the quickstart: accuracy before and after, the reward curve, and next steps."""

import sys
from pathlib import Path

from cairn.flows.reading.views import run_status
from cairn.flows.report.curve import reward_curve
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store

PICTURE = Path("build/quickstart/reward.png")


def main(run: str = "quickstart") -> None:
    """Print the report of a run in `./runs`."""
    store = open_store(".")
    status = run_status(store, run)
    reward_curve(Ledger.open(store, run), PICTURE)
    heldout = status.eval["heldout"]
    tried = {
        f"cairn show {run}@{status.iterations - 1} --limit 3": "prompts, responses, rewards and advantages of the end",
        f"cairn status {run}": "where the run stands",
        f"cairn verify {run}": "hash every file again and walk the chain from weights to prompts",
        f"cairn report {run}": "curves, costs and every sample in one HTML file that works offline",
        "cairn up": "the Prefect UI with every iteration's DAG",
    }
    width = max(map(len, tried)) + 3
    menu = "\n".join(f"  {command:{width}}{what}" for command, what in tried.items())
    print(f"""
Held-out sampled accuracy: {heldout.first:.2f} before, {heldout.last:.2f} after {status.iterations} iterations of GRPO.
Reward curve: {PICTURE}

What to try next (the commands are in .venv/bin):
{menu}
  cairn train configs/recipes/quickstart.yaml --run again
  {"":{width}}the same run under another name: kill -9 it at any moment, then
  {"cairn resume again":{width}}… and compare state_digest in `cairn status again --json`""")


if __name__ == "__main__":
    main(*sys.argv[1:])
