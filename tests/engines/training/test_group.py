"""The sender of a broadcast is free by its deadline, whatever a receiver does."""

import time
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from cairn.engines.training.weight_group import SendingGroup
from cairn.engines.types.errors import EngineError

DEADLINE = 3.0
"""Seconds."""

LARGE = 256 * 1024**2
"""Bytes that do not fit between the ends of a connection."""


def join_and_take_nothing(name: str, host: str, port: int, joined: Any) -> None:
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper

    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    _new_process_group_helper(
        2, 1, [], Backend("gloo"), PrefixStore(name, store), group_name=GroupName(name), timeout=timedelta(seconds=60)
    )
    joined.set()
    time.sleep(600)


@pytest.mark.proof
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dies", [False, True])
def test_a_receiver_that_takes_nothing_or_dies_frees_the_sender_by_its_deadline(dies: bool) -> None:
    context = get_context("spawn")
    joined = context.Event()
    group = SendingGroup("group", "127.0.0.1", 120)
    receiver = context.Process(target=join_and_take_nothing, args=("group", "127.0.0.1", group.port, joined))
    receiver.start()
    try:
        group.join(2, "gloo")
        assert joined.wait(120)
        _set_pg_timeout(timedelta(seconds=DEADLINE), group._group)
        group._timeout = DEADLINE
        if dies:
            receiver.kill()
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"is gone|did not take its weights"):
            group.send(torch.zeros(LARGE, dtype=torch.uint8))
        group.leave()
        assert time.monotonic() - began < DEADLINE + 10
    finally:
        receiver.kill()
        receiver.join()
