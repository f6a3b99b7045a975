"""Results of the quickstart: accuracy before and after, curves and samples, and next steps."""

import sys
from pathlib import Path

from cairn.flows.reading.views import run_status
from cairn.flows.report.build import write_report
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store

PAGE = Path("build/quickstart/report.html")


def main(run: str = "quickstart") -> None:
    """Print the report of a run in `./runs`."""
    store = open_store(".")
    status = run_status(store, run)
    write_report(Ledger.open(store, run), PAGE, lambda what, done, of: None, verified=False)
    heldout = status.eval["heldout"]
    tried = {
        f"cairn show {run}@{status.iterations - 1} --limit 3": "prompts, responses, rewards and advantages of the end",
        f"cairn status {run}": "where the run stands",
        f"cairn verify {run}": "hash every file again and walk the chain from weights to prompts",
        f"cairn report {run}": "that page again, with a verification of every byte",
        "cairn up": "the Prefect UI with every iteration's DAG",
    }
    width = max(map(len, tried)) + 3
    menu = "\n".join(f"  {command:{width}}{what}" for command, what in tried.items())
    print(f"""
Held-out sampled accuracy: {heldout.first:.2f} before, {heldout.last:.2f} after {status.iterations} iterations of GRPO.
Reward curve, costs and every sample: {PAGE}

What to try next (the commands are in .venv/bin):
{menu}
  cairn train configs/recipes/quickstart.yaml --run again
  {"":{width}}the same run under another name: kill -9 it at any moment, then
  {"cairn resume again":{width}}… and compare state_digest in `cairn status again --json`""")


if __name__ == "__main__":
    main(*sys.argv[1:])
