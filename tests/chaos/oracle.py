"""What must hold of a run at its end, whatever has happened to it on the way.

equal           the state digest after every train step, and the names of all commits, are those of the undisturbed run
once            each step was committed by one driver, and is in the ledger as that driver made it
kept            no sample that was finished, which means durable, was generated again
`cairn verify`  finds nothing
`cairn diff`    to the undisturbed run finds nothing: every table of every step holds the same values
`cairn gc`      leaves no file in the run that is neither a marker nor what a commit names
nothing left    no process that a driver started, no shared memory

Where rollouts do not come out the same when they are done again (partial rollout by time; an engine that is not
batch-invariant), there is no undisturbed run to be equal to. Such a run must be what its rollouts make it: every other
step, done again in this process from the very samples that were committed, gives the same.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from cairn.configs.schema.run import RunConfig
from cairn.flows.cli.command import Root
from cairn.flows.cli.housekeeping import gc
from cairn.flows.driver.sources import Sources, open_graders
from cairn.flows.history.diff import diff
from cairn.flows.history.replay import Replaying
from cairn.flows.iteration import iteration
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.storage.store import canonical
from cairn.storage.upkeep.retention import is_retired
from cairn.storage.upkeep.verification import verify
from tests.chaos.commands import unusable_forks
from tests.chaos.runs import Disturbed
from tests.local_fleet import LocalFleet


def differences(
    run: Disturbed, undisturbed: Disturbed | None, shared_memory: Callable[[], set[str]] = set
) -> list[str]:
    """What of a finished run is not as it must be: nothing. `undisturbed` is None where there can be no such run,
    `shared_memory` gives the segments that were left behind, where nobody else looks for them."""
    found = [f"left behind {left}" for left in run.left_behind()]
    found += [f"shared memory left behind: {name}" for name in sorted(shared_memory())]
    found += recommitted(run)
    if undisturbed is None:
        found += not_recomputed(run.ledger())
    else:
        found += unequal(run, undisturbed)
    if twice := run.generated().samples_twice:
        found.append(f"{twice} finished samples were generated again")
    found += [finding.message for checked in verify(run.ledger()) for finding in checked.findings]
    found += unusable_forks(run.ledger().store)
    found += [f"not removed by gc: {path}" for path in strays_after_gc(run.ledger())]
    return found


def differing_digests(run: Disturbed, undisturbed: Disturbed) -> int:
    """How many train steps ended in another state, or not at all."""
    digests, expected = run.state_digests(), undisturbed.state_digests()
    return max(len(digests), len(expected)) - sum(a == b for a, b in zip(digests, expected, strict=False))


def unequal(run: Disturbed, undisturbed: Disturbed) -> list[str]:
    """Where a run is not equal to its undisturbed twin."""
    found = []
    total = _config(run.ledger()).rollout.num_rollout
    if run.state_digests() != undisturbed.state_digests() or len(run.state_digests()) != total:
        found.append(f"state digests {run.state_digests()}, expected {undisturbed.state_digests()}")
    other = {commit.name for commit in run.commits()} ^ {commit.name for commit in undisturbed.commits()}
    if other:
        found.append(f"committed in one of the two alone: {sorted(other)}")
    parting = diff(run.ledger(), undisturbed.ledger())
    found += [f"differs from the undisturbed run in {sentence}" for sentence in parting.retired]
    # How workers are held changes nothing of what they make.
    if options := [option for option in parting.options if not option[0].startswith("fleet.")]:
        found.append(f"configured otherwise: {options}")
    if parting.parts_at or parting.ended:
        found.append(f"parts from the undisturbed run at {parting.parts_at or parting.ended}: {parting.how}")
    if not parting.compared:
        found.append("diff compared no commit")
    return found


def recommitted(run: Disturbed) -> list[str]:
    """What tells that a step was committed by more than one driver, or by one and changed since. A driver that is
    killed right after a commit may not have noted it."""
    file = run.folder / "committed.jsonl"
    noted = [tuple(json.loads(line)) for line in file.open()] if file.exists() else []
    if run.exits and not noted:
        return ["its drivers have noted no commits"]
    found = []
    if twice := [name for name, times in Counter(name for name, _ in noted).items() if times > 1]:
        found.append(f"committed more than once: {twice}")
    if other := set(noted) - {(commit.name, commit.digest) for commit in run.commits()}:
        found.append(f"committed, and not so in the ledger: {sorted(other)}")
    return found


def not_recomputed(ledger: Ledger) -> list[str]:
    """Return the differences of steps that are repeated from the committed samples."""
    config = _config(ledger)
    found = []
    with ExitStack() as stack:
        engines: Any = LocalFleet(config.model_copy(update={"rollout": _by_transformers(config.rollout)}))
        graders = open_graders(config, stack, ledger.store)
        sources = Sources.open(config)
        run = sources.context(config, ledger, lambda: engines, graders, lambda event: None)
        scratch = open_store(stack.enter_context(TemporaryDirectory(prefix="cairn-oracle-")))
        for index in ledger.iterations():
            runner = _FromSamples(run, Step.TRAIN, None, scratch)
            iteration(run, runner, index)
            found += [
                f"{replayed.name} recomputed: {why}" for replayed in runner.replayed for why in replayed.differences
            ]
    return found


class _FromSamples(Replaying):
    """Repeats the steps that are computed from samples. (Checkpoints have the digest of their train step; a sync has no
    content.)"""

    REPEATED = (Step.REWARD, Step.FILTER, Step.SCORE, Step.ADVANTAGE, Step.TRAIN)

    def call(self, step: Any, index: int, shard: str | None, *args: Any, **kwargs: Any) -> Any:
        self._wanted = step.name if step.name in self.REPEATED else Step.EVAL
        if step.name not in self.REPEATED:
            return self._run.committed(index, step.name, shard)
        return super().call(step, index, shard, *args, **kwargs)


def _config(ledger: Ledger) -> RunConfig:
    return RunConfig.model_validate(ledger.manifest.config)


def _by_transformers(rollout: Any) -> Any:
    """The engine of this process, which is not used."""
    return rollout.model_copy(update={"engine": "transformers", "sglang": {}, "router": None, "num_engines": 1})


def strays_after_gc(ledger: Ledger) -> list[str]:
    """Files of a run that `cairn gc --apply` leaves and that nothing accounts for."""
    gc(Root(ledger.store.url), ledger.run, apply=True)
    store, folder = ledger.store, layout.run(ledger.run)
    known = set()
    for index in ledger.iterations():  # a fork may have a checkpoint of its own in one that it shares
        known |= set(ledger.markers(index))
        for commit in ledger.commits(index):
            if not is_retired(ledger, commit):
                known |= {layout.in_run(commit.run, output.path) for output in commit.outputs}
    there = {*store.find(folder), *(write.path for write in store.unfinished(folder)), *_on_disk(store.url, folder)}
    return sorted(path for path in there - known if not _is_marker(ledger, path))


def _on_disk(url: str, folder: str) -> set[str]:
    """Files below a folder of a store, hidden ones too, where it is one of this machine."""
    if "://" in url:
        return set()
    found = (Path(top, name) for top, _, names in os.walk(Path(url, folder)) for name in names)
    return {str(file.relative_to(url)) for file in found}


def _is_marker(ledger: Ledger, path: str) -> bool:
    """Whether a file is one of the small sealed ones beside the iterations: manifest, leases, retirements."""
    if path.startswith(layout.iterations(ledger.run)):
        return False
    with suppress(ValueError, FileNotFoundError):
        canonical.unseal(ledger.store.read(path))
        return True
    return False


def survivors(victims: Sequence[psutil.Process], patience: float = 20.0) -> list[psutil.Process]:
    """Which of the processes still run after a while; those that nobody has waited for do not."""
    _, alive = psutil.wait_procs(list(victims), patience)
    return [process for process in victims if process in alive and not _is_zombie(process)]


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def seconds_to_recover(run: Disturbed) -> list[float | None]:
    """From each fault to the next commit, of the next driver where this one ended; None where none came after it."""
    commits = sorted(run.commits(), key=lambda commit: commit.committed_at)

    def recovery(fault: dict[str, Any]) -> float | None:
        before = max((commit.epoch for commit in commits if commit.committed_at <= fault["at"]), default=0)
        least = before + 1 if fault["victim"] in ("ray", "database") else 0
        later = (c.committed_at - fault["at"] for c in commits if c.committed_at > fault["at"] and c.epoch >= least)
        return next(later, None)

    return [recovery(fault) for fault in run.struck()]
