"""A driver with faults in it: `python -m tests.chaos.driver STORE RUN CONFIG_FILE [FAULTS WITNESS]`."""

import json
import sys
from pathlib import Path

from configs.schema.run import RunConfig
from flows.train import start
from storage.commits import Step
from tests.chaos.faults import Fault, Striker


def main(store: str, run: str, config_file: str, faults: str = "[]", witness: str = "/dev/null") -> None:
    config = RunConfig.model_validate_json(Path(config_file).read_text())
    fields = [{**fault, "step": Step(fault["step"])} for fault in json.loads(faults)]
    start(store, run, config, on_event=Striker([Fault(**fault) for fault in fields], Path(witness)))


if __name__ == "__main__":
    main(*sys.argv[1:])
