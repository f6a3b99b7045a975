"""A driver with faults in it: `python -m tests.chaos.driver STORE RUN CONFIG_FILE FOLDER FAULTS [takeover]`.

In FOLDER it notes the faults (witness.jsonl), the groups that it asks rollout engines for (asked.jsonl) and the commits
that it makes (committed.jsonl).
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tasks.rollout
from configs.schema.run import RunConfig
from engines.types import GenerateRequest
from flows.cli.app import describe, exit_code
from flows.train import start
from storage.commits import Commit, Step
from storage.ledger import Ledger
from tests.chaos.faults import Fault, Striker


def main(store: str, run: str, config_file: str, folder: str, faults: str, *flags: str) -> None:
    config = RunConfig.model_validate_json(Path(config_file).read_text())
    fields = [{**fault, "step": Step(fault["step"])} for fault in json.loads(faults)]
    note_what_is_generated(Path(folder) / "asked.jsonl")
    note_what_is_committed(Path(folder) / "committed.jsonl")
    striker = Striker([Fault(**fault) for fault in fields], Path(folder) / "witness.jsonl")
    try:
        start(store, run, config, "takeover" in flags, striker)
    except Exception as error:  # as the command line ends
        code = exit_code(error)
        if code is None:
            raise
        print(describe(error), file=sys.stderr)
        sys.exit(code)


def note_what_is_generated(file: Path) -> None:
    """Append the groups of every call to an engine; those of more than one call were generated again."""
    generate = tasks.rollout.generate_groups

    def noting(
        step: Any, engine: Any, weights: Any, requests: Sequence[GenerateRequest], **options: Any
    ) -> Iterator[Any]:
        with file.open("a") as asked:
            asked.write(json.dumps([request.request_id for request in requests]) + "\n")
        yield from generate(step, engine, weights, requests, **options)

    tasks.rollout.generate_groups = noting


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
