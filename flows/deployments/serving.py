"""The process that serves the deployments: it takes up flow runs that are due, each in a process of its own, and looks
after those whose driver is gone (`cairn.flows.deployments.watching`).

    python -P -m cairn.flows.deployments.serving PARENT_PID

It makes its imports, reads a line with the address of the Ray cluster that drivers are to join, empty where each starts
its own, and prints a line when the deployments are there.

`cairn up` starts it. SIGTERM ends it in order, and so does the end of its parent: its flow runs are told at the same
time, and have `GRACE` seconds to give their runs back.

Prefect's own handler of SIGTERM cancels flow runs one after the other, each with half a minute, and leaves the loop by
an exception out of a signal handler. Here the loop hears the signal itself, and then no flow run is left to cancel.
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
from cairn.flows.deployments.flows import FLOWS, SERVED_BY, STORE
from cairn.flows.deployments.names import DEPLOYMENT
from cairn.flows.deployments.watching import watch

GRACE = 40.0
"""Seconds that flow runs have to end; `operations.grace_period` is 30 by default."""

POLL_INTERVAL = 2.0
"""Seconds between two questions for flow runs that are due."""


PEOPLES = {"schedules", "paused", "concurrency_limit", "concurrency_options"}
"""What people set of a deployment: where it is there already, Prefect would put ours in its place, and delete every
schedule."""


async def deployments(store: str) -> list[RunnerDeployment]:
    """All of them. Flow runs that name no store are made with this one, and keep it whoever takes them up."""
    found = []
    for flow in FLOWS:
        deployment = await flow.ato_deployment(
            DEPLOYMENT, parameters={"store": store}, entrypoint_type=EntrypointType.MODULE_PATH, tags=["cairn"]
        )
        deployment.model_fields_set.difference_update(PEOPLES)
        found.append(deployment)
    return found


async def serve(parent: int) -> None:
    """Serve until SIGTERM, or until process `parent` is gone."""
    runner = Runner(name="cairn", pause_on_shutdown=False, limit=None, query_seconds=POLL_INTERVAL)
    told = asyncio.Event()
    for deployment in await deployments(os.environ[STORE]):
        await runner.aadd_deployment(deployment)
    running = asyncio.create_task(runner.start())
    while not runner.started and not running.done():
        await asyncio.sleep(0.05)
    # In the place of Prefect's, which `start` has set.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    over = threading.Event()
    watching = threading.Thread(target=watch, args=(over,), name="watching", daemon=True)
    watching.start()
    print("serving", flush=True)
    ended = asyncio.create_task(told.wait())
    gone = asyncio.create_task(_gone(parent))
    await asyncio.wait({running, ended, gone}, return_when=asyncio.FIRST_COMPLETED)
    over.set()
    if not running.done():
        await asyncio.to_thread(end_flow_runs)
        if gone.done():
            os._exit(1)  # the server went with the parent, and Prefect's client would wait for it
        await runner.astop()
    with suppress(asyncio.CancelledError):
        await running


def end_flow_runs() -> None:
    """Tell all flow runs at once to end, and kill those that do not within `GRACE` seconds."""
    processes = psutil.Process().children()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, late = psutil.wait_procs(processes, GRACE)
    for process in late:
        with suppress(psutil.NoSuchProcess):
            process.kill()


async def _gone(parent: int) -> None:
    while os.getppid() == parent:
        await asyncio.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(prog="cairn.flows.deployments.serving")
    parser.add_argument("parent", type=int, help="process with which this one ends")
    parent = parser.parse_args().parent
    os.environ[SERVED_BY] = str(os.getpid())  # flow runs inherit it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then says when
    told = sys.stdin.readline()
    if not told:
        raise SystemExit("nobody will tell it to serve any more")
    if told.strip():
        os.environ[ADDRESS] = told.strip()
    asyncio.run(serve(parent))


if __name__ == "__main__":
    main()
