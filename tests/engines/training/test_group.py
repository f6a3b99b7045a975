"""The sender of a broadcast is free by its deadline, whatever a receiver does."""

import threading
import time
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from cairn.engines.training.weight_group import SendingGroup
from cairn.engines.types.errors import EngineError, EngineTimeout

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


class NeverConnects:
    """The process group of a receiver that dies before NCCL connects: the first broadcast blocks, and so does an
    abort."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def broadcast(self, *_: Any) -> None:
        self.ended.wait()

    def abort(self) -> None:
        self.ended.wait()


def test_a_first_broadcast_that_blocks_ends_by_its_deadline_and_the_sender_can_leave() -> None:
    group = SendingGroup("group", "127.0.0.1", 0.2)
    blocked = NeverConnects()
    group._group, group.size = blocked, 2
    with pytest.raises(EngineTimeout, match=r"did not connect to the trainer within 0\.2 s"):
        group.send(torch.zeros(1))
    group.leave()
    assert group.size == 0
    blocked.ended.set()


@pytest.mark.proof
def test_a_meeting_to_which_nobody_comes_ends_by_its_deadline() -> None:
    group = SendingGroup("group", "127.0.0.1", DEADLINE)
    began = time.monotonic()
    with pytest.raises(EngineError, match="did not connect to the trainer"):
        group.join(2, "gloo")
    assert time.monotonic() - began < DEADLINE + 60
