"""Ranks that are forked from one process, which has made the imports for all of them."""

import atexit
import gc
import os
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing

from tests.forks import FORKS


def run_ranks(part: Callable[..., None], *args: Any, world_size: int) -> None:
    """Call `part(rank, *args)` on every rank, one thread each; return when all have ended, raise what one raised."""
    start = {"join": False, "start_method": FORKS.get_start_method()}
    context = torch.multiprocessing.start_processes(_alone, (_all_ranks, part, args, world_size), nprocs=1, **start)
    while not context.join(timeout=60):
        pass


def run_megatron_ranks(part: Callable[..., None], *args: Any, world_size: int) -> None:
    """The same where Megatron is imported already."""
    run_with_megatron(_all_ranks, part, args, world_size)


def run_with_megatron(body: Callable[..., None], *args: Any) -> None:
    """Call `body(*args)` in a process that may fork ranks by `fork_ranks` and has imported Megatron, which takes
    ten seconds: all are forks of the first."""
    launcher = _launcher()
    launcher.send((body, args))
    while not launcher.poll(60):
        pass
    if (failed := launcher.recv()) is not None:
        raise RuntimeError(failed)


def fork_ranks(part: Callable[..., None], *args: Any, world_size: int) -> None:
    """Call `part(rank, *args)` in a fork for each rank, which ends with what it started."""
    torch.multiprocessing.start_processes(part, args, nprocs=world_size, start_method="fork")


@cache
def _launcher() -> "Connection[Any, Any]":
    """To the process that has imported Megatron, which ends with this one."""
    here, there = FORKS.Pipe()
    FORKS.Process(target=_launch, args=(there,)).start()
    there.close()
    atexit.register(here.close)
    return here


def _launch(requests: "Connection[Any, Any]") -> None:
    from cairn.engines.training.megatron.backend import backend_for

    backend_for(torch.device("cpu"))
    import cairn.engines.training.megatron.convert
    import cairn.engines.training.megatron.engine  # noqa: F401

    gc.freeze()  # Megatron looks for garbage whenever it writes or reads a checkpoint
    while True:
        try:
            body, args = requests.recv()
        except EOFError:
            return
        try:
            torch.multiprocessing.start_processes(_alone, (body, *args), nprocs=1, start_method="fork")
            requests.send(None)
        except Exception:
            requests.send(traceback.format_exc())


def _alone(_: int, body: Callable[..., None], *args: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    body(*args)


def _all_ranks(part: Callable[..., None], args: tuple[Any, ...], world_size: int) -> None:
    fork_ranks(part, *args, world_size=world_size)
