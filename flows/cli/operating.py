"""The command that lets people operate runs from Prefect's interface: up."""

import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cairn.flows.cli.app import TERMINATED, StoreOption, mind_interrupts, tell

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cairn.flows.deployments.up import Up

REFRESH = 3.0
"""Seconds between two looks at the runs."""

MOST_RUNS = 12
"""That are shown: those which committed last."""


def up(
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Where to listen; whoever reaches it may start runs.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of the UI; 0 takes a free one.")] = 4200,
    no_ray: Annotated[
        bool, typer.Option("--no-ray", help="Start no Ray head: each run starts a cluster of its own.")
    ] = False,
    store: StoreOption = ".",
) -> None:
    """Operate runs from Prefect's interface: start, watch, cancel, retry, resume, fork, verify them. Until Ctrl-C.

    Starts Prefect's server over the history of the folder one stands in, serves the deployments, and starts a Ray head
    that their runs share. PREFECT_API_URL names a server that is there already, CAIRN_RAY_ADDRESS a cluster. Runs that
    were started in the interface end in order with this command, and Retry goes on with them; others do not need it.

    Examples:

    - `cairn up`
    - `cairn up --port 4300 --store s3://bucket/experiments`
    - `CAIRN_RAY_ADDRESS=auto cairn up` on a machine of a Ray cluster
    """
    from cairn.flows.orchestration.server import is_loopback

    mind_interrupts()
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(TERMINATED))
    if not is_loopback(host):
        tell(f"whoever reaches {host} may start runs, and thereby code: let a firewall or a proxy decide who does")
    from cairn.flows.deployments.up import start

    tell("starting; this takes some seconds")
    running = start(store, host=host, port=port, ray=not no_ray)
    try:
        tell(f"the Prefect UI is at {running.ui_url}; Ctrl-C stops it")
        _show(running)
    finally:
        tell("stopping; drivers give their runs back")
        running.close()


def _show(running: "Up") -> None:
    """What runs, until that ends or somebody ends it."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    if not console.is_terminal:
        while True:
            running.require()
            time.sleep(REFRESH)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            running.require()
            live.update(_table(running), refresh=True)
            time.sleep(REFRESH)


def _table(running: "Up") -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from cairn.flows.cli.tables import STATE_STYLES, age
    from cairn.flows.deployments.names import NAMES

    parts = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=False)
    parts.add_row("Prefect", running.ui_url if running.server else f"{running.ui_url}, as configured")
    parts.add_row("deployments", f"{', '.join(NAMES)} ({running.serving.state})")
    if running.ray is not None:
        parts.add_row("Ray", f"{running.ray_address} ({running.ray.state})")
    else:
        parts.add_row("Ray", running.ray_address or "each run starts its own")
    parts.add_row("store", running.store)
    runs = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("run", "state", "iterations", "step", "reward", "last commit"):
        runs.add_column(name)
    for status in _newest(running.store):
        runs.add_row(
            status.run,
            Text(status.state, STATE_STYLES[status.state]),
            f"{status.iterations}/{status.num_rollout}",
            status.step or "",
            "" if status.reward is None else f"{status.reward:.3f}",
            age(status.last_commit_at),
        )
    return Group(parts, "", runs)


def _newest(store: str) -> list[Any]:
    from cairn.flows.reading.views import all_runs
    from cairn.storage.errors import StoreError
    from cairn.storage.store import open_store

    try:
        found = all_runs(open_store(store))
    except StoreError:  # it may come back
        return []
    return sorted(found, key=lambda status: status.last_commit_at or 0, reverse=True)[:MOST_RUNS]
