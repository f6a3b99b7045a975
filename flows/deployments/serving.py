"""The process that serves the deployments: it executes due flow runs, each in its own process, and watches for flow
runs whose driver is gone (`cairn.flows.deployments.watching`).

    python -P -m cairn.flows.deployments.serving PARENT_PID

It imports its modules, then reads one line from stdin: the address of the Ray cluster that drivers join, or empty where
each driver starts its own. When the deployments are registered it prints a line.

`cairn up` starts it. SIGTERM and the end of its parent end it in order: it signals all flow runs at once, and they have
`GRACE` seconds to release their runs.

Prefect's own SIGTERM handler cancels flow runs one after the other, half a minute each. Here the event loop handles the
signal, and no flow run is left for Prefect to cancel.
"""

import argparse
import asyncio
import os
import signal
import sys
import threading
from contextlib import suppress

import psutil
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from prefect.runner import Runner

from cairn.engines.fleet.address import ADDRESS
from cairn.flows.deployments.flows import FLOWS, SERVER_PID, STORE
from cairn.flows.deployments.watching import watch
from cairn.flows.orchestration.artifacts.pages import board_link

GRACE = 40.0
"""Seconds that flow runs have to end; `operations.grace_period` is 30 by default."""

POLL_INTERVAL = 2.0
"""Seconds between two queries for due flow runs."""


USER_SETTINGS = {"schedules", "paused", "concurrency_limit", "concurrency_options"}
"""Settings of a deployment that users change: for an existing deployment, Prefect would overwrite them and delete
every schedule."""


async def deployments(store: str) -> list[RunnerDeployment]:
    """Return all deployments. Flow runs that name no store get this one when they are created, and retain it whichever
    process executes them."""
    deployments = []
    for flow in FLOWS:
        about = (flow.description or "").partition("\n\n")[0]  # without what each parameter means
        deployment = await flow.ato_deployment(
            flow.name,
            description="\n\n".join([about, *board_link()]),
            parameters={"store": store},
            entrypoint_type=EntrypointType.MODULE_PATH,
            tags=["cairn"],
        )
        deployment.model_fields_set.difference_update(USER_SETTINGS)
        deployments.append(deployment)
    return deployments


async def serve(parent: int) -> None:
    """Serve until SIGTERM, or until process `parent` is gone."""
    runner = Runner(name="cairn", pause_on_shutdown=False, limit=None, query_seconds=POLL_INTERVAL)
    terminated = asyncio.Event()
    for deployment in await deployments(os.environ[STORE]):
        await runner.aadd_deployment(deployment)
    running = asyncio.create_task(runner.start())
    while not runner.started and not running.done():
        await asyncio.sleep(0.05)
    # Replaces Prefect's handler, which `start` has set.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    over = threading.Event()
    watching = threading.Thread(target=watch, args=(over,), name="watching", daemon=True)
    watching.start()
    print("serving", flush=True)
    ended = asyncio.create_task(terminated.wait())
    orphaned = asyncio.create_task(_end_of_parent(parent))
    await asyncio.wait({running, ended, orphaned}, return_when=asyncio.FIRST_COMPLETED)
    over.set()
    if not running.done():
        await asyncio.to_thread(end_flow_runs)
        if orphaned.done():
            os._exit(1)  # the server ended with the parent, and Prefect's client would wait for it
        await runner.astop()
    with suppress(asyncio.CancelledError):
        await running


def end_flow_runs() -> None:
    """Send SIGTERM to all flow runs at once, and kill those that do not end within `GRACE` seconds."""
    processes = psutil.Process().children()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, late = psutil.wait_procs(processes, GRACE)
    for process in late:
        with suppress(psutil.NoSuchProcess):
            process.kill()


async def _end_of_parent(parent: int) -> None:
    while os.getppid() == parent:
        await asyncio.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(prog="cairn.flows.deployments.serving")
    parser.add_argument("parent", type=int, help="id of the process that ends this one with it")
    parent = parser.parse_args().parent
    os.environ[SERVER_PID] = str(os.getpid())  # flow runs inherit it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then sends SIGTERM
    address = sys.stdin.readline()
    if not address:
        raise SystemExit("the parent process is gone: nothing to serve")
    if address.strip():
        os.environ[ADDRESS] = address.strip()
    asyncio.run(serve(parent))


if __name__ == "__main__":
    main()
