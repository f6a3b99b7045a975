"""The engines of a run, started beside what needs no engine yet."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.fencing import Tenure
from cairn.storage import canonical
from cairn.storage.ledger import Ledger
from cairn.storage.store import Store
from cairn.tasks.versions import weight_version_after

if TYPE_CHECKING:
    from cairn.engines.fleet.fleet import Fleet


@contextmanager
def starting_fleet(
    config: RunConfig,
    name: str,
    total_steps: int,
    digests: Mapping[str, str],
    tenure: Tenure | None,
    tell: Callable[[str], None] = lambda sentence: None,
    trains_only: bool = False,
) -> "Iterator[Callable[[], Fleet]]":
    """Engines that start beside whatever the block does, and are closed with it; calling what it yields awaits them.
    Their models must have these digests. `tenure`, `tell`, `trains_only`: see `Fleet.start`."""
    from cairn.engines.fleet.fleet import Fleet  # Ray takes a second to import

    deadline = config.fleet.start_timeout * 2
    with ThreadPoolExecutor(1, thread_name_prefix="fleet") as pool:
        fleet = pool.submit(
            Fleet.start,
            config,
            name=name,
            total_steps=total_steps,
            model_digests=digests,
            tenure=tenure,
            tell=tell,
            trains_only=trains_only,
        )
        try:
            yield lambda: fleet.result(timeout=deadline)
        finally:
            if fleet.exception(timeout=deadline) is None:
                fleet.result().close()


def fleet_name(store: Store, run: str) -> str:
    """Name of the run's actors, unlike that of any other run in any other store."""
    return f"{run}-{canonical.digest(store.url)[:8]}"


def total_steps(ledger: Ledger, config: RunConfig) -> int:
    """Optimizer steps of the whole run, a fork's shared ones included."""
    return weight_version_after(ledger, config.rollout.num_rollout - 1)
