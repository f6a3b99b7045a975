"""How a run that was opened before its flow began reaches the flow's body.

In a file of its own: where Prefect starts a deployment, it sends the flow to another process together with what the
flow's module defines, which a context variable does not survive.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cairn.flows.events import OnEvent
from cairn.flows.preemption import Ending
from cairn.tasks.context import RunContext

OpenedRun = tuple[RunContext, OnEvent, Ending]
"""A live run, whom to tell what happens, and whether it is to end."""

_opened: ContextVar[OpenedRun | None] = ContextVar("opened", default=None)


@contextmanager
def handing_over(run: OpenedRun) -> Iterator[None]:
    """Let the flow that the block calls take the run."""
    token = _opened.set(run)
    try:
        yield
    finally:
        _opened.reset(token)


def handed_over() -> OpenedRun | None:
    """The run that this flow's caller opened; None where Prefect started the flow."""
    return _opened.get()
