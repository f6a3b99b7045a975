"""Why a run ended: what happened, the commonest error, what still stands, and the command that goes on.

| the run | the command |
|---|---|
| failed in its samples' code, or over an option | `cairn fork` after its last complete iteration, or else another run |
| has a damaged ledger | `cairn verify` |
| ended in any other way | `cairn resume`, or `cairn train` where a store may not name all that the run uses |

A run changes neither its code nor its options. A command is to be typed in the driver's working folder, with the
variables on which the right to run a ledger's code depends.
"""

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cairn.configs.schema.run import RunConfig
from cairn.flows.text import printable
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.leases import VARIABLES, DriverFailure, Holder, LeaseState, Outcome, all_leases
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.records import Record
from cairn.storage.store.errors import Retired
from cairn.storage.store.store import Store
from cairn.tasks.grading.failures import COLUMNS, CommonError, common_error

_CHECKPOINT = re.compile(r"/iterations/(\d+)/checkpoint/")
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|OutOfMemory", re.IGNORECASE)


class RunFailure(Record):
    """Why a run, or a command, ended early."""

    what: str
    """What happened, in a sentence or a few."""
    commonest: CommonError | None = None
    """The commonest error behind it."""
    stands: str | None = None
    """What is committed."""
    advice: str | None = None
    """What to change first."""
    next: tuple[str, ...] = ()
    """Commands for a shell that go on from here, one after the other."""
    instead: tuple[str, ...] = ()
    """Other commands that do, in place of those."""

    @property
    def sentence(self) -> str:
        """What happened and the commonest error, on one line."""
        what, one = self.what.partition("\n")[0].rstrip("."), self.commonest
        return what if one is None or one.error in what else f"{what}: {_spelled(one)}"

    def facts(self) -> list[tuple[str, str]]:
        """Return (name, text) of each part that it has, without the commands."""
        often, one = None, self.commonest
        if one is not None:
            spelled = "this" if one.error in self.what else _spelled(one)
            often = f"{spelled}, {one.count} of {one.total} {one.unit}"
        named = {"what happened": self.what, "commonest error": often, "what stands": self.stands, "first": self.advice}
        return [(name, text) for name, text in named.items() if text]

    def commands(self, *, elsewhere: bool = False) -> list[tuple[str, str]]:
        """Return (name, command) of each command. `elsewhere`: for a reader who need not be in this process's working
        folder."""
        names = [*("next", "then")[: len(self.next)], *("or", "and then")[: len(self.instead)]]
        here = f"cd {_quoted(os.getcwd())} && " if elsewhere else ""
        lines = (line if line.startswith("cd ") else here + line for line in (*self.next, *self.instead))
        return list(zip(names, lines, strict=True))


def _spelled(one: CommonError) -> str:
    return one.error if one.place is None else f"{one.error} at {one.place}"


@dataclass(frozen=True)
class Terminal:
    """Where commands about a store are typed."""

    url: str
    """Address of the store; of a folder its absolute path."""
    folder: str | None = None
    """Folder to type them in; None: any."""
    variables: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, store: Store, holder: Holder) -> "Terminal":
        """Return the terminal of a driver. Only the variables that a driver records count: a store may hold others."""
        return cls(
            store.url, holder.folder, {name: holder.variables[name] for name in VARIABLES if name in holder.variables}
        )

    def line(self, *words: str) -> str:
        """Return a command with the store, the folder and the variables that it needs."""
        folder = self.folder or os.getcwd()
        default = os.path.normpath(os.path.join(folder, os.environ.get("CAIRN_STORE", "")))
        place = () if self.url == folder == default else ("--store", _near(self.url, folder))
        variables = [f"{name}={_quoted(value)}" for name, value in self.variables.items()]
        command = " ".join([*variables, *map(_quoted, [*words, *place])])
        return command if folder == os.getcwd() else f"cd {_quoted(folder)} && {command}"


def _quoted(word: str) -> str:
    """Return a word for a shell; with control characters in the form of bash and zsh that prints as it is typed."""
    if printable(word) == word and "\n" not in word:
        return shlex.quote(word)
    word = word.replace("\\", "\\\\").replace("'", "\\'")
    letters = (one if one.isprintable() or ord(one) >= 160 else f"\\u{ord(one):04x}" for one in word)
    return f"$'{''.join(letters)}'"


def _near(url: str, folder: str) -> str:
    """Return a store's address, relative to a folder around it."""
    return os.path.relpath(url, folder) if url.startswith(f"{folder}/") else url


def samples_failed(ledger: Ledger, commits: Iterable[Commit]) -> CommonError | None:
    """Return the commonest error of the samples that reward steps could not grade. Reads tables only where some
    failed."""
    graded = [commit for commit in commits if commit.step is Step.REWARD]
    if not any(commit.metrics.get("failed_samples") for commit in graded):
        return None
    try:
        return common_error(
            read_table(ledger.store, commit.run, output, COLUMNS) for commit in graded for output in commit.outputs
        )
    except Retired:
        return None


def run_failure(
    ledger: Ledger,
    config: RunConfig,
    lease: LeaseState,
    *,
    complete: int,
    iteration: int | None,
    version: int,
    newest: Commit | None,
    samples: CommonError | None,
) -> RunFailure:
    """Return why a run ended that is not complete.

    Args:
        complete: number of complete iterations.
        iteration: where it goes on.
        version: weight version.
        newest: newest commit.
        samples: of the newest iteration, see `samples_failed`.
    """
    ways, failure = _Ways(ledger, config, lease, complete), lease.failure
    stands = _stands(complete, iteration, version, newest)
    if failure is None:
        what = {
            Outcome.FAILED: "the driver ended with an error that is not recorded",
            Outcome.STOPPED: "a person or a program stopped the driver",
        }.get(lease.outcome or Outcome.COMPLETED, "the driver's process is gone: it was killed, or its machine ended")
        return RunFailure(what=what, stands=stands, next=ways.resume())
    commonest, what = _tries(failure), failure.error
    if failure.iteration is not None and not what.startswith(f"iteration {failure.iteration}"):
        memory = ", out of memory" if OUT_OF_MEMORY.search(what) else ""
        what = f"iteration {failure.iteration}, {failure.step}{memory}: {what}"
    if failure.kind == "BatchNotFilled" and samples is not None and str(samples) in what:
        commonest, what = samples, what.replace(str(samples), f"{samples.failed} of {samples.total} samples failed")
    return RunFailure(what=what, commonest=commonest, stands=stands, **ways.after(failure))


def _tries(failure: DriverFailure) -> CommonError | None:
    """Return how often a step failed, where it was more than once."""
    count, unit = (failure.shards, "shards") if failure.shards > 1 else (failure.tries, "tries")
    if count < 2:
        return None
    error = failure.error.partition("\n")[0]
    return CommonError(error=error, count=count, failed=count, total=count, unit=f"{unit} of {failure.step}")


def _stands(complete: int, iteration: int | None, version: int, newest: Commit | None) -> str:
    if newest is None:
        return "nothing is committed yet"
    done = f"iteration{'s 0 to' if complete > 1 else ''} {complete - 1}, weight version {version}" if complete else ""
    begun = f"iteration {iteration} up to {newest.name}" if newest.iteration == iteration else ""
    return ", and ".join(filter(None, (done, begun)))


@dataclass(frozen=True)
class _Ways:
    """How a run goes on."""

    ledger: Ledger
    config: RunConfig
    lease: LeaseState
    complete: int
    """Number of complete iterations."""

    def after(self, failure: DriverFailure) -> dict[str, Any]:
        """Return the fields `advice`, `next` and `instead` of `RunFailure`."""
        advice, run = failure.advice, self.ledger.run
        if failure.kind == "BatchNotFilled":
            advice = None if advice is None else advice.partition(", and fork")[0]
            easier = ["rollout.dynamic_sampling_filter=check_reward_nonzero_std_with_fallback"]
            return {"advice": advice, "next": self.anew(easier if advice and "_with_fallback" in advice else [])}
        if OUT_OF_MEMORY.search(failure.error) and failure.step in (Step.TRAIN, Step.SCORE):
            smaller = _smaller(self.config)
            advice = f"free memory; or go on with smaller micro-batches, {smaller}"
            return {"advice": advice, "next": self.resume(), "instead": self.anew([smaller])}
        if failure.kind == "ClusterError" and self.config.fleet.ray_address is not None:
            advice = "start the cluster; or go on with one of the run's own, without fleet.ray_address"
            return {"advice": advice, "next": self.resume(), "instead": self.anew(["fleet.ray_address=null"])}
        if failure.kind == "BadData":
            return {"advice": advice, "next": self.anew([])}
        if failure.kind == "NotFinite":
            return {"advice": advice, "next": self.anew([f"training.lr={self.config.training.lr / 10:g}"])}
        if (place := _CHECKPOINT.search(failure.error)) is not None and failure.kind == "Damaged":
            advice = "restore the file from a backup; or go on from before that checkpoint"
            return {"advice": advice, "next": self.resume(), "instead": self.anew([], int(place[1]))}
        command = {"Damaged": "verify", "ReplayDiverged": "verify", "LeaseLost": "status"}.get(failure.kind)
        return {"advice": advice, "next": self.resume() if command is None else (self.line(command, run),)}

    def line(self, *words: str) -> str:
        """Return a command of Cairn, for the terminal of the driver."""
        return Terminal.of(self.ledger.store, self.lease.holder).line("cairn", *words)

    def resume(self) -> tuple[str, ...]:
        """Return the command that continues the run with its configuration."""
        store, run = self.ledger.store, self.ledger.run
        trusted = self.lease.failure is None or self.lease.failure.resumable
        started = None if trusted and not self.ledger.manifest.imported else train_command(store, run)
        return (started or self.line("resume", run),)

    def anew(self, options: Sequence[str], complete: int | None = None) -> tuple[str, ...]:
        """Return the commands that go on with other code, or with `options` of the form a.b=value changed: a fork after
        the first `complete` iterations, by default all that are, or another run."""
        run, name = self.ledger.run, free_name(self.ledger.store, self.ledger.run)
        complete = self.complete if complete is None else complete
        if complete and self.config.rollout.pipeline != "streaming":
            changed = [word for option in options for word in ("--set", option)]
            return self.line("fork", f"{run}@{complete - 1}", name, *changed), self.line("resume", name)
        started = train_command(self.ledger.store, run, name, options)
        return (started or self.line("status", run),)


def _smaller(config: RunConfig) -> str:
    """Return the option that halves the micro-batches of a configuration."""
    if config.training.micro_batch_size is not None:
        return f"training.micro_batch_size={max(1, config.training.micro_batch_size // 2)}"
    return f"training.max_tokens_per_gpu={max(1, (config.training.max_tokens_per_gpu or 16384) // 2)}"


def train_command(store: Store, run: str, new: str | None = None, options: Sequence[str] = ()) -> str | None:
    """Return the command that started a run from its recipe, or from traces; None where none of its drivers was started
    so.

    Args:
        new: name of another run to start in the same way, with `options` of the form a.b=value changed.
    """
    for lease in reversed(all_leases(store, run)):
        words = ["cairn", *lease.holder.command[1:]]  # whatever the store calls the program
        if words[1:2] == ["train"] or words[1:3] == ["import", "traces"]:
            words = without(words, "--store", "--run")
            for option in options:
                words = _set(words, option)
            return Terminal.of(store, lease.holder).line(*words, "--run", new or run)
    return None


def _set(words: Sequence[str], option: str) -> list[str]:
    """Return a command line with an option of the form a.b=value, in place of another value for it."""
    name = option.partition("=")[0]
    old = [place for place, word in enumerate(words) if word.startswith(f"{name}=") and words[place - 1] == "--set"]
    kept = [word for place, word in enumerate(words) if place not in old and place + 1 not in old]
    return [*kept, "--set", option]


def without(words: Sequence[str], *options: str) -> list[str]:
    """Return a command line without some options that have a value, and without `--takeover`."""
    left, skip = [], False
    for word in words:
        if not (skip or word == "--takeover" or word.startswith(tuple(f"{option}=" for option in options))):
            left.append(word)
            skip = word in options and bool(left.pop())
        else:
            skip = False
    return left


def free_name(store: Store, run: str) -> str:
    """Return a name like that of a run which no run has: `run-2`."""
    stem = re.sub(r"-\d+$", "", run)
    number = 2
    while store.exists(layout.run_manifest(f"{stem}-{number}")):
        number += 1
    return f"{stem}-{number}"
