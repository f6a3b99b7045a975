import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings

from cairn.flows.driver.signals import NOTICES
from cairn.storage.ledger.leases import Lease

# Ray's workers give way to every other process by default: a test next to them would starve them.
os.environ.setdefault("RAY_worker_niceness", "0")

# A busy machine is slow, and that is no failure.
settings.register_profile("cairn", deadline=None)
settings.load_profile("cairn")

pytest_plugins = [
    "pytester",
    "tests.tiers",
    "tests.seconds",
    "tests.scheduling",
    "tests.spare_engines",
    "tests.s3",
    "tests.tiny_run",
    "tests.ray_fixtures",
    "tests.sglang_server",
    "tests.prefect_server",
    "tests.browser",
    "tests.bubblewrap",
]


def pytest_sessionstart() -> None:
    """Disable the garbage collector: imports make no garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Refuse a file that imports megatron.core when it is collected: no later test could prepare it for the CPU."""
    was_imported = "megatron.core" in sys.modules
    report = yield
    if not was_imported and "megatron.core" in sys.modules:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} imports megatron.core: import it in a test, after `backend_for`"
    return report


@pytest.fixture(scope="module", autouse=True)
def _release_memory() -> Iterator[None]:
    """Release what engines in the test's own process leave. TorchScript never drops a recording by itself: several
    megabytes each, and hundreds of tests make one. The garbage collector skips what is left then."""
    from tests.spare_engines import forget  # pytest imports its plugins itself

    yield
    forget()
    gc.collect()
    gc.freeze()
    if torch := sys.modules.get("torch"):
        torch._C._jit_clear_class_registry()
        torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()


@pytest.fixture(autouse=True)
def _restore_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that commands install when they are called in the test's own process."""
    before = {signum: signal.getsignal(signum) for signum in (*NOTICES, signal.SIGINT)}
    yield
    for signum, handler in before.items():
        if handler is not None and signal.getsignal(signum) is not handler:
            signal.signal(signum, handler)


@pytest.fixture(autouse=True)
def _end_leases() -> Iterator[None]:
    """End leases that a test did not release: they would be renewed every few seconds until the session ends."""
    begun: list[Lease] = []
    begin = Lease.__init__

    def note_and_begin(lease: Lease, *args: Any) -> None:
        begun.append(lease)
        begin(lease, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lease, "__init__", note_and_begin)
        yield
    for lease in begun:
        lease._ended.set()
