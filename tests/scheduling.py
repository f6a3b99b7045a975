"""Which worker runs which file: tests that share a server stay on one worker, and the longest files begin first.

Every test of a kind in `SHARED` uses a session fixture that takes long to start. A kind belongs to the worker that
began it, so that its server starts once; another worker takes its files only when nothing else is left.
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

SHARED = {
    "an SGLang server": ("tests/engines/rollout/sglang/",),
    "a Ray cluster": (
        "tests/engines/fleet/",
        "tests/engines/training/megatron/test_fleet.py",
        "tests/engines/fleet/weights/test_transports.py",
        "tests/flows/test_streaming_staleness.py",
        "tests/tasks/test_colocation.py",
        "tests/tasks/generation/test_episodes.py",
        "tests/tasks/trainer/test_publications.py",
    ),
}
"""Paths of the tests of a kind."""

LONGEST = (
    "tests/chaos/",
    "tests/bench/",
    "tests/engines/rollout/sglang/",
    "tests/engines/fleet/",
    "tests/engines/training/megatron/",
    "tests/flows/deployments/",
    "tests/flows/",
)
"""Paths that begin before all others, in this order: what begins late and takes long keeps one worker alone."""


class BySharedServer(LoadFileScheduling):
    """As `--dist loadfile`, but a worker takes first the files that use what it has already started."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self._owners: dict[str, WorkerController] = {}

    def _assign_work_unit(self, node: WorkerController) -> None:
        free = [file for file in self.workqueue if self._owners.get(kind_of(file), node) is node]
        if free:
            if kind := kind_of(free[0]):
                self._owners[kind] = node
            self.workqueue.move_to_end(free[0], last=False)
        super()._assign_work_unit(node)


def kind_of(file: str) -> str:
    """The kind in `SHARED` of a file's tests, or nothing."""
    return next((kind for kind, paths in SHARED.items() if file.startswith(paths)), "")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {path: place for place, path in enumerate(LONGEST)}
    items.sort(key=lambda item: next((order[path] for path in LONGEST if item.nodeid.startswith(path)), len(order)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> BySharedServer:
    return BySharedServer(config, log)
