"""All terms of a run, from its manifest's to those that the running code commits under. See `cairn.storage.terms`."""

import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from cairn.storage import canonical, layout
from cairn.storage.errors import Damaged, RunDiffers
from cairn.storage.leases import Lease
from cairn.storage.store import Store
from cairn.storage.terms import Rules, Terms, Upgrade, as_read_now, differences, input_differences, plain
from cairn.storage.version import code_version


class RunTerms:
    """The terms of one run, by number: 0 are its manifest's. Safe to use from several threads."""

    def __init__(self, store: Store, manifest: Terms):
        self._store = store
        self._manifest = manifest
        self._now: Terms | None = None
        """Those of the code that runs, where it has said what they are."""
        self._committing_under: int | None = None
        self._upgrades: tuple[Upgrade, ...] | None = None
        self._lock = threading.Lock()

    @property
    def upgrades(self) -> tuple[Upgrade, ...]:
        """Terms of the versions of the code that went on with the run after the one that created it, as they were when
        this was first asked for. One request for each, and one. Raises Damaged."""
        if self._upgrades is None:
            self._upgrades = tuple(self._read(1))
        return self._upgrades

    @property
    def now(self) -> Terms:
        """Those that this process has said it goes on under, or else the newest."""
        if self._now is not None:
            return self._now
        return self.upgrades[-1] if self.upgrades else self._manifest

    def numbered(self, number: int) -> Terms | None:
        """None if they are missing."""
        if number == 0:
            return self._manifest
        if number > len(self.upgrades):
            self._upgrades = (*self.upgrades, *self._read(len(self.upgrades) + 1))
        return self.upgrades[number - 1] if number <= len(self.upgrades) else None

    def begin(self) -> None:
        """This process has created the run."""
        self._now, self._committing_under, self._upgrades = self._manifest, 0, ()

    def go_on_under(
        self,
        config: BaseModel | Mapping[str, Any],
        inputs: Mapping[str, str] | None,
        rules: Mapping[str, Rules] | None,
    ) -> None:
        """This process commits under these, of which None stands for what was recorded. Raises RunDiffers."""
        recorded = self.now
        differing = differences(as_read_now(recorded.config, config), plain(config))
        if inputs is not None:
            differing += input_differences(recorded.inputs, inputs)
        if differing:
            raise RunDiffers(recorded.run, differing)
        self._now = Terms(
            run=recorded.run,
            config=plain(config),
            inputs=dict(recorded.inputs if inputs is None else inputs),
            rules=recorded.rules if rules is None else dict(rules),
            code_version=code_version(),
        )

    def record(self, lease: Lease) -> int:
        """The number of the terms that this process commits under, recorded if they are new. Raises LeaseLost."""
        with self._lock:
            while self._committing_under is None:
                recorded = [self._manifest, *self.upgrades]
                number = len(recorded)
                if self._now is None or self._now.same_as(recorded[-1]):
                    self._committing_under = number - 1
                    continue
                fields = self._now.model_dump(mode="json", include=set(Terms.model_fields))
                upgrade = Upgrade(**fields, number=number, epoch=lease.epoch, recorded_at=time.time())
                data = canonical.seal(upgrade.model_dump(mode="json"))
                if self._store.create(layout.upgrade(self._manifest.run, number), data, lease.check):
                    self._committing_under = number
                self._upgrades = (*self.upgrades, *self._read(number))
            return self._committing_under

    def _read(self, first: int) -> Iterator[Upgrade]:
        run = self._manifest.run
        for number in itertools.count(first):
            path = layout.upgrade(run, number)
            try:
                upgrade = Upgrade.from_bytes(self._store.read(path))
                if (upgrade.run, upgrade.number) != (run, number):
                    raise ValueError(f"it says it is number {upgrade.number} of run {upgrade.run!r}")
                yield upgrade
            except FileNotFoundError:
                return
            except ValueError as error:
                raise Damaged(f"{path} cannot be trusted: {error}") from None
