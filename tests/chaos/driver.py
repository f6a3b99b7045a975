"""A driver with faults in it: `python -m tests.chaos.driver STORE RUN CONFIG_FILE FOLDER FAULTS [takeover]`.

In FOLDER it notes the faults (witness.jsonl), the groups that it asks rollout engines for and those that are finished
(generated.jsonl), the calls of episodes that are durable (calls.jsonl), and the commits that it makes
(committed.jsonl).
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

import cairn.tasks.generation.rollout
import cairn.tasks.streaming.engine_work
from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.types.keeping import SampleEnd
from cairn.engines.types.trajectories import CallKind, SampleRequest
from cairn.flows.cli.app import describe, exit_code
from cairn.flows.driver.preemption import Preempted
from cairn.flows.driver.signals import EXIT_CODE
from cairn.flows.events import Event
from cairn.flows.train import start
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import Status
from cairn.storage.ledger.snapshots import Attempt
from cairn.storage.logs.call_log import CallLog
from cairn.storage.logs.sample_log import SampleLog
from cairn.storage.opening import open_for_runs
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.step import StepCall
from cairn.tasks.generation.shard import Shard
from tests.chaos.faults import Fault, Striker
from tests.chaos.runs import STREAM


def main(store: str, run: str, config_file: str, folder: str, faults: str, *flags: str) -> None:
    config = RunConfig.model_validate_json(Path(config_file).read_text())
    fields = [{**fault, "step": Step(fault["step"])} for fault in json.loads(faults)]
    note_what_is_generated(Path(folder) / "generated.jsonl")
    note_what_is_recorded(Path(folder) / "calls.jsonl")
    note_what_is_committed(Path(folder) / "committed.jsonl")
    striker = Striker([Fault(**fault) for fault in fields], Path(folder) / "witness.jsonl", store, run)

    def on_event(event: Event) -> None:
        if isinstance(event, Message):
            print(event.text, flush=True)
        striker(event)

    try:
        start(open_for_runs(store), run, config, "takeover" in flags, on_event)
    except Exception as error:  # as the command line ends
        code = exit_code(error)
        if code is None:
            raise
        print(describe(error), file=sys.stderr)
        sys.exit(code)
    except Preempted:
        sys.exit(EXIT_CODE)


def note_what_is_generated(file: Path) -> None:
    """Append the samples of every call to an engine, and each once it is finished, that is durable: what is asked for
    after that was generated twice."""
    generate, keep = cairn.tasks.streaming.engine_work.generate_samples, RolloutHandle.keep

    def keeping(engine: RolloutHandle, make: Callable[[], Any]) -> Any:
        return keep(engine, partial(noting, file, make))

    def asking_for_stream(
        step: StepCall,
        engine: Any,
        weights: Any,
        samples: Sequence[SampleRequest],
        *args: Any,
        joined: Callable[[], Sequence[SampleRequest]],
        **options: Any,
    ) -> Iterator[Any]:
        def joining() -> Sequence[SampleRequest]:
            others = joined()
            note(file, *STREAM, asked=[sample.key for sample in others])
            return others

        note(file, *STREAM, asked=[sample.key for sample in samples])
        yield from generate(step, engine, weights, samples, *args, joined=joining, **options)

    cairn.tasks.streaming.engine_work.generate_samples = asking_for_stream  # type: ignore[attr-defined]
    RolloutHandle.keep = keeping  # type: ignore[method-assign]
    note_what_is_asked(file)
    note_what_is_finished(file)


def note(file: Path, iteration: int, shard: str | None, **samples: Any) -> None:
    with file.open("a") as noted:
        noted.write(json.dumps({"iteration": iteration, "shard": shard, **samples}) + "\n")


def noting(file: Path, make: Callable[[], Any]) -> Any:
    """Make a keeper in an engine's process, and note there what it asks for and finishes."""
    note_what_is_asked(file)
    note_what_is_finished(file)
    return make()


def note_what_is_asked(file: Path) -> None:
    """Append the samples that this process asks its engine for, before they are generated."""
    ends = Shard.ends
    if ends.__name__ == "asking":  # an earlier driver's
        return

    def asking(shard: Shard, *args: Any) -> Iterator[list[SampleEnd]]:
        asked = [sample.key for samples in shard.left().missing.values() for sample in samples]
        note(file, shard._attempt.iteration, shard._attempt.shard, asked=asked)
        return ends(shard, *args)

    Shard.ends = asking  # type: ignore[method-assign]


def note_what_is_finished(file: Path) -> None:
    """Append the samples that this process makes durable."""
    write = SampleLog._write_part
    if write.__name__ == "writing":  # an earlier driver's
        return

    def writing(log: SampleLog, table: pa.Table, *args: Any, **options: Any) -> None:
        write(log, table, *args, **options)
        keys = list(zip(table["group_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True))
        attempt = log._attempt
        if isinstance(attempt, Attempt):
            note(file, attempt.iteration, attempt.shard, finished=keys)
        else:
            statuses = table["status"].to_pylist()
            ended = [key for key, status in zip(keys, statuses, strict=True) if status != Status.ABORTED]
            note(file, *STREAM, finished=ended)

    SampleLog._write_part = writing  # type: ignore[method-assign]


def note_what_is_recorded(file: Path) -> None:
    """Append the calls of episodes when they are durable: the policy's answers, what is asked for after which was
    sampled twice; the intents to call tools, with the arguments; and the answers of tools.

    An attempt notes what it finds too: the one before it may have been lost between a part and its note."""
    write, begin = CallLog._write_part, CallLog.__init__

    def note(table: pa.Table) -> None:
        sampled, intended, answered = [], [], []
        for row in table.to_pylist():
            call = [row["group_id"], row["sample_index"], row["call"]]
            if row["kind"] == CallKind.SAMPLE:
                sampled.append(call)
            elif row["order"] is None:
                intended.append([*call, row["arguments"]])
            else:
                answered.append(call)
        if sampled or intended or answered:
            noted = {"at": time.time(), "calls": sampled, "intended": intended, "answered": answered}
            with file.open("a") as notes:
                notes.write(json.dumps(noted) + "\n")

    def writing(log: CallLog, table: pa.Table, *args: Any, **options: Any) -> None:
        write(log, table, *args, **options)
        note(table)

    def recovering(log: CallLog, *args: Any, **options: Any) -> None:
        begin(log, *args, **options)
        note(log.recovered)

    CallLog._write_part = writing  # type: ignore[method-assign]
    CallLog.__init__ = recovering  # type: ignore[method-assign]


def note_what_is_committed(file: Path) -> None:
    """Append name and digest of each commit that this driver made, once it is there; not of those it found."""
    commit = Ledger.commit

    def noting(ledger: Ledger, **fields: Any) -> Commit:
        made = commit(ledger, **fields)
        if made.attempt == fields["attempt"].name:
            with file.open("a") as committed:
                committed.write(json.dumps([made.name, made.digest]) + "\n")
        return made

    Ledger.commit = noting  # type: ignore[method-assign]


if __name__ == "__main__":
    main(*sys.argv[1:])
