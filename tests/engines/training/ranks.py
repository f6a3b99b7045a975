"""Ranks that are forked from one process, which has made the imports for all of them."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing

from tests.forks import FORKS


def run_ranks(part: Callable[..., None], *args: Any, world_size: int) -> None:
    """Call `part(rank, *args)` on every rank, one thread each; return when all have ended, raise what one raised."""
    run_forking(_all_ranks, part, args, world_size)


def run_forking(body: Callable[..., None], *args: Any) -> None:
    """Call `body(*args)` in a process that may fork ranks by `fork_ranks`; this one has threads of its own."""
    start = {"join": False, "start_method": FORKS.get_start_method()}
    context = torch.multiprocessing.start_processes(_alone, (body, *args), nprocs=1, **start)
    while not context.join(timeout=60):
        pass


def fork_ranks(part: Callable[..., None], *args: Any, world_size: int) -> None:
    """Call `part(rank, *args)` in a fork for each rank, which ends with what it started."""
    torch.multiprocessing.start_processes(part, args, nprocs=world_size, start_method="fork")


def _alone(_: int, body: Callable[..., None], *args: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    body(*args)


def _all_ranks(part: Callable[..., None], args: tuple[Any, ...], world_size: int) -> None:
    fork_ranks(part, *args, world_size=world_size)
