"""Faults and the moments at which they strike: a driver process brings them upon itself or upon what it works with.

moment        when                                                          what the ledger holds then
before        the step is about to do work                                  nothing of the step
during        a few milliseconds into the step's work, or at its end       nothing, or parts without a commit
uncommitted   the step's files are written, its commit is about to be made  files without a commit
after         the commit is there                                           the step
halfway       the rollout's first group has finished                        parts without a commit
loading       a checkpoint is about to be loaded, to restore the trainer    the step, from an earlier driver or engine
replaying     a few milliseconds into the replay of a train step            the same
computing     the ranks of the training engine have just been sent an       nothing of the step
              update
updating      an update of an engine to the weights has begun, in flight:   the step
              to those of the step, or of a later one (in_flight.py)

victim        what happens to it                                            what the driver does
driver        SIGKILL                                                       dies; the next one goes on
notice        SIGTERM of the driver                                         saves its weights and ends; the next goes on
training      SIGKILL of the first rank of the training engine              starts another engine and goes on
rank          the same of the last rank                                     the same
rollout       SIGKILL of a rollout engine, the one that is being updated    starts another and goes on
update        none: it is ended before it has brought the weights           tries again
grader        SIGKILL of a grader process                                   grades again in another and goes on
ray           SIGKILL of gcs_server and raylet of its cluster               ends with a sentence; the next one goes on
prefect       SIGKILL of its Prefect server                                 starts another and goes on
database      the server's database is deleted, and the server killed       goes on, or ends with a sentence
store         the S3 store breaks all connections for a while               tries again and goes on
server        SIGKILL of an engine's SGLang server                          starts another and goes on
scheduler     SIGKILL of the scheduler below it, which holds the model      the same
stopped       SIGSTOP of an engine's SGLang server and its processes        starts another and goes on
router        SIGKILL of the router before the servers                      starts another and goes on
worker        SIGKILL of a worker of episodes                               starts another and goes on
code          SIGKILL of the process below it in which their code runs      the same
tool          SIGKILL of a process in which their tools run                 goes on; the episodes whose calls with
                                                                            effects cannot be looked up fail
gc, fork, delete    none: somebody gives the command (tests/chaos/commands.py)    goes on
event         none: the test does something to its machine meanwhile        (tests/chaos/events)

Every fault writes a witness before it strikes, so that a run without a fault cannot pass for one that survived it.
What comes to a driver's machine and not to a process of its own (a network that parts, power that goes) is not done
here: at an `event` the driver waits until the test has done it.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from cairn.engines.fleet.handles import UPDATING
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.fleet.training import TrainingHandle
from cairn.engines.rollout.base import RolloutEngine
from cairn.engines.types.types import FinishReason
from cairn.flows.events import Event
from cairn.flows.orchestration.server import PREFECT_HOME
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.snapshots import Attempt
from cairn.storage.logs.sample_log import SampleLog
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import StepCommitted, StepStarted
from cairn.tasks.durable.step import DurableStep, Outcome, StepCall
from cairn.tasks.generation import rollout
from cairn.tasks.trainer import recovery
from tests.chaos.commands import COMMANDS, Command, give
from tests.chaos.in_flight import watch_updates
from tests.faulty_s3 import control
from tests.waiting import wait_for

Moment = Literal["before", "during", "uncommitted", "after"]
"""Of every step."""
RareMoment = Literal["halfway", "loading", "replaying", "computing", "updating"]
"""Moments of one kind of step each: a rollout; a checkpoint, and a train step, from which weights are restored; a train
step; a sync step of a stream."""
Victim = Literal["driver", "training", "rollout", "ray", "prefect", "database", "store"]
FurtherVictim = (
    Literal["notice", "rank", "hung", "grader", "server", "scheduler", "stopped", "router", "update"] | Command
)
"""What has its moments in some steps only, or in some configurations."""
EpisodeVictim = Literal["worker", "code", "tool"]
"""What there is while episodes run: tests/chaos/test_episodes.py."""
AnyVictim = Victim | FurtherVictim | EpisodeVictim | Literal["event"]

CLUSTER = "CAIRN_TEST_CLUSTER"
"""Environment variable with the process id of the raylet whose cluster a driver joins: its engines are there."""

INTO_THE_WORK = 0.01
"""Seconds between the beginning of a step's work and the fault during it; work that is done sooner waits for it."""

TRAINING, ROLLOUT, EPISODES = "ray::TrainingActor", "ray::RolloutActor", "ray::EpisodesActor"
"""How Ray calls their processes."""

FAILED = "failed:"
"""How the account of a command begins that ended in an error."""

PATIENCE = 30.0
"""Seconds in which a victim must be found: one that is being replaced, or given another title by Ray, is not seen."""

_SIGNALS: dict[AnyVictim, signal.Signals] = {
    "notice": signal.SIGTERM,
    "stopped": signal.SIGSTOP,
    "hung": signal.SIGSTOP,
}
"""Those that are not killed."""

OUTAGE = 2.0
"""Seconds for which a store is away."""


@dataclass(frozen=True)
class Fault:
    """Strike `victim` once, at `moment` of the first shard of `step` in `iteration`."""

    iteration: int
    step: Step
    moment: Moment | RareMoment
    victim: AnyVictim = "driver"

    def __str__(self) -> str:
        return f"{self.victim} {self.moment} {self.step} of iteration {self.iteration}"


class Striker:
    """Watches one driver's events and strikes when a fault's moment has come, each fault once."""

    def __init__(self, faults: list[Fault], witness: Path, store_url: str, run: str) -> None:
        self._pending = list(faults)
        self._witness = witness
        self._store_url, self._run = store_url, run
        self._lock = threading.Lock()
        self._training = -1
        """Iteration whose train step began last."""
        commit = Ledger.commit

        def committing(ledger: Ledger, **fields: Any) -> Commit:
            self._strike(fields["iteration"], fields["step"], "uncommitted")
            return commit(ledger, **fields)

        Ledger.commit = committing  # type: ignore[method-assign]
        append = SampleLog.append

        def appending(log: SampleLog, *samples: Any, **options: Any) -> None:
            append(log, *samples, **options)
            if samples and isinstance(attempt := log._attempt, Attempt):  # and no stream's
                self._strike(attempt.iteration, attempt.step, "halfway")

        SampleLog.append = appending  # type: ignore[method-assign]
        generate = rollout.generate_shard

        def generating(step: StepCall, *args: Any) -> Iterator[Any]:
            """Engines have logs of their own: their samples are there when the driver hears of their ends."""
            for message in generate(step, *args):
                if isinstance(message, list) and any(end.finish_reason != FinishReason.ABORT for end in message):
                    self._strike(step.iteration, Step.ROLLOUT, "halfway")
                yield message

        rollout.generate_shard = generating
        perform = DurableStep.perform

        def performing(step: DurableStep[Any], call: StepCall, *args: Any, **kwargs: Any) -> Outcome:
            if step.name is Step.TRAIN:
                self._training = call.iteration
            fault = self._take(call.iteration, step.name, "during")
            return perform(step if fault is None else self._struck(step, fault), call, *args, **kwargs)

        DurableStep.perform = performing  # type: ignore[method-assign]
        self._watch_recovery()
        self._watch_training()
        if any(fault.moment == "updating" for fault in faults):
            watch_updates(self._awaits_update, self._strike_update, PATIENCE)

    def _watch_recovery(self) -> None:
        newest_checkpoint, replay = recovery.newest_checkpoint, recovery.replay

        def loading(ledger: Ledger, iteration: int) -> Commit | None:
            saved = newest_checkpoint(ledger, iteration)
            if saved is not None:
                self._strike(saved.iteration, Step.CHECKPOINT, "loading")
            return saved

        def replaying(run: RunContext, committed: Commit) -> None:
            fault = self._take(committed.iteration, Step.TRAIN, "replaying")
            with self._meanwhile(fault):
                replay(run, committed)

        recovery.newest_checkpoint, recovery.replay = loading, replaying

    def _watch_training(self) -> None:
        send = TrainingHandle._send_all

        def sending(engine: TrainingHandle, method: Any, *args: Any, **kwargs: Any) -> Any:
            fault = self._take(self._training, Step.TRAIN, "computing") if method.__name__ == "train" else None
            if fault is None:
                return send(engine, method, *args, **kwargs)
            victims = [psutil.Process(engine.health()["pids"][-1])]
            calls = send(engine, method, *args, **kwargs)
            bear_witness(self._witness, victims, **asdict(fault))
            strike(fault.victim, victims, Path.cwd() / PREFECT_HOME)
            return calls

        TrainingHandle._send_all = sending  # type: ignore[method-assign]

    def __call__(self, event: Event) -> None:
        """To be given to `cairn.flows.train.start`."""
        if isinstance(event, StepStarted):
            self._strike(event.iteration, event.step, "before")
        elif isinstance(event, StepCommitted) and not event.adopted:
            self._strike(event.commit.iteration, event.commit.step, "after")

    def _struck(self, step: DurableStep[Any], fault: Fault) -> DurableStep[Any]:
        """The step with a body that does not end before the fault has happened."""

        def body(*args: Any, **kwargs: Any) -> Outcome:
            with self._meanwhile(fault):
                return step.body(*args, **kwargs)

        return replace(step, body=body)

    @contextlib.contextmanager
    def _meanwhile(self, fault: Fault | None) -> Iterator[None]:
        """Strike while the block works; it does not end before."""
        if fault is None:
            yield
            return
        blow = threading.Timer(INTO_THE_WORK, self._bring_about, [fault])
        blow.start()
        try:
            yield
        finally:
            blow.join()

    def _strike(self, iteration: int, step: Step, moment: str) -> None:
        fault = self._take(iteration, step, moment)
        if fault is not None:
            self._bring_about(fault)

    def _take(self, iteration: int, step: Step, moment: str) -> Fault | None:
        """The fault whose moment this is, which nobody else gets then."""
        with self._lock:
            for fault in self._pending:
                if (fault.iteration, fault.step, fault.moment) == (iteration, step, moment):
                    self._pending.remove(fault)
                    return fault
        return None

    def _awaits_update(self, iteration: int) -> bool:
        with self._lock:
            return any(fault.moment == "updating" and fault.iteration <= iteration for fault in self._pending)

    def _strike_update(self, iteration: int, engine: RolloutHandle) -> None:
        if not (resting := len(engine.retracted())):
            return  # it was too fast: the fault is left to another engine, or a later iteration
        with self._lock:
            due = [one for one in self._pending if one.moment == "updating" and one.iteration <= iteration]
            for fault in due[:1]:
                self._pending.remove(fault)
        for fault in due[:1]:
            pids = {"driver": os.getpid(), "rollout": engine.health()["pid"]}
            victims = [psutil.Process(pids[fault.victim])] if fault.victim in pids else []
            bear_witness(self._witness, victims, **asdict(fault), resting=resting)
            if fault.victim == "update":
                engine.call(UPDATING, RolloutEngine.end_weight_update).result()
            strike(fault.victim, victims, Path.cwd() / PREFECT_HOME)

    def _bring_about(self, fault: Fault) -> None:
        account = asdict(fault)
        if fault.victim == "event":
            bear_witness(self._witness, [], **account)
            wait_for(mark_of(self._witness, fault).exists)
            return
        if fault.victim in COMMANDS:
            came = self._give(fault.victim)
            bear_witness(self._witness, [], **account, came=came)
            return
        raylet = os.environ.get(CLUSTER)
        cluster = None if raylet is None else psutil.Process(int(raylet))
        end = time.monotonic() + PATIENCE
        while not (victims := processes(psutil.Process(), fault.victim, cluster)):
            if fault.victim == "store" or time.monotonic() > end:
                break
            time.sleep(0.02)
        if fault.victim == "store":
            account["met_before"] = outages_met(os.environ["AWS_ENDPOINT_URL"])
        bear_witness(self._witness, victims, **account)
        strike(fault.victim, victims, Path.cwd() / PREFECT_HOME)

    def _give(self, command: Command) -> str:
        """Run a command and return its result. The witness records its error, which the struck step does not see."""
        try:
            return give(command, self._store_url, self._run)
        except Exception as error:
            return f"{FAILED} {type(error).__name__}: {error}"


def mark_of(witness: Path, fault: Fault) -> Path:
    """The file by which a test says that its event has happened."""
    return witness.with_name(f"{fault}.happened")


def outages_met(endpoint: str) -> int:
    """How many requests have met an outage of the store so far."""
    return control(endpoint).get("outage", 0)


def processes(driver: psutil.Process, victim: AnyVictim, cluster: psutil.Process | None = None) -> list[psutil.Process]:
    """Which processes the fault ends: of a driver's, and of those below the raylet of the cluster that it has joined.
    None for the store and for commands, and none where there is none of that kind."""
    if victim in ("driver", "notice"):
        return [driver]
    chosen: Callable[[list[str], str], bool] = {
        "training": lambda command, name: command[0].startswith(TRAINING),
        "rank": lambda command, name: command[0].startswith(TRAINING),
        "rollout": lambda command, name: command[0].startswith(ROLLOUT),
        "grader": lambda command, name: any("cairn.tasks.grading.worker" in word for word in command),
        "ray": lambda command, name: name in ("gcs_server", "raylet"),
        "prefect": lambda command, name: "cairn.flows.orchestration.server_process" in command,
        "database": lambda command, name: "cairn.flows.orchestration.server_process" in command,
        "server": lambda command, name: _is_server(command),
        "scheduler": lambda command, name: command[0].startswith("sglang::scheduler"),
        "stopped": lambda command, name: _is_server(command),
        "worker": lambda command, name: command[0].startswith(EPISODES),
        "code": lambda command, name: _runs("user_process", command),
        "tool": lambda command, name: _runs("tools.worker", command),
        "router": lambda command, name: (
            any(word.endswith("start_router.py") for word in command) and not _is_guard(command)
        ),
    }.get(victim, lambda command, name: False)
    below = _below(driver)
    if cluster is not None:
        below += _below(cluster)
    found = []
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            command = process.cmdline()
            if command and chosen(command, process.name()):
                found.append(process)
    found.sort(key=lambda process: process.pid)
    chosen_ones = found if victim == "ray" else found[-1:] if victim == "rank" else found[:1]
    if victim == "stopped":
        for process in tuple(chosen_ones):
            with contextlib.suppress(psutil.NoSuchProcess):
                chosen_ones += process.children(recursive=True)
    return chosen_ones


def engines_of(cluster: psutil.Process) -> dict[psutil.Process, list[str]]:
    """The engines on a cluster, given by its raylet, with their command lines."""
    found = {}
    for process in _below(cluster):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            command = process.cmdline()
            if command and command[0].startswith((TRAINING, ROLLOUT)):
                found[process] = command
    return found


def three_engines(cluster: psutil.Process) -> set[psutil.Process]:
    """Return the three engines of a run. Waits for one to which Ray gives another title for a moment."""
    return wait_for(lambda: len(found := {*engines_of(cluster)}) == 3 and found)


def _below(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _is_server(command: list[str]) -> bool:
    return "sglang.launch_server" in command and not _is_guard(command)


def _runs(module: str, command: list[str]) -> bool:
    """Whether it is a process of episodes: `python -c` with an import of the module."""
    return any(f"{module} import main" in word for word in command)


def _is_guard(command: list[str]) -> bool:
    return any(word.endswith("guard.py") for word in command)


def bear_witness(witness: Path, victims: list[psutil.Process], **account: Any) -> None:
    """Write down what is about to happen, and to which processes."""
    with witness.open("a") as file:
        file.write(json.dumps({**account, "pids": [process.pid for process in victims], "at": time.time()}) + "\n")


def strike(victim: AnyVictim, victims: list[psutil.Process], prefect_home: Path) -> None:
    """Let it happen."""
    if victim == "store":
        control(os.environ["AWS_ENDPOINT_URL"], outage=OUTAGE)
    if victim == "database":
        for file in prefect_home.glob("prefect.db*"):
            file.unlink(missing_ok=True)  # the server, which still lives, removes some itself
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(_SIGNALS.get(victim, signal.SIGKILL))
