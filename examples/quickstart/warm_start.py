"""The warm start of the tiny model: a run that learns from demonstrations, in a ledger of its own.

`cairn train` starts it, as for any run; an interrupted build resumes.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cairn.configs.loader import load
from cairn.configs.schema.run import RunConfig
from cairn.flows.export.model import CARD, export
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from examples.quickstart.build import RECIPE

RUN = "warm-start"
BATCH = 64
"""Demonstrations of an optimizer step."""
STEPS_PER_ITERATION = 10


def overrides(folder: Path, steps: int) -> list[str]:
    """Return the changes to the recipe for a build of `steps` optimizer steps in `folder`."""
    return [
        f"model.path={folder / 'untrained'}",
        f"data.path={folder / 'demonstrations.jsonl'}",
        f"rollout.num_rollout={steps // STEPS_PER_ITERATION}",
    ]


def config(folder: Path, steps: int) -> RunConfig:
    """Return the configuration of the run."""
    return load(RECIPE, overrides(folder, steps))


def warm_start(folder: Path, steps: int, options: Sequence[str] = ()) -> None:
    """Train the model in `folder/untrained` on the demonstrations of the folder, in order and each once, in the store
    `folder`; resume the run if it exists. `steps` is a multiple of `STEPS_PER_ITERATION`; `options` are beyond
    the recipe's. Raises subprocess.CalledProcessError."""
    command = ["train", str(RECIPE), "--run", RUN, "--store", str(folder)]
    for override in [*overrides(folder, steps), *options]:
        command += ["--set", override]
    subprocess.run([Path(sys.executable).with_name("cairn"), *command], check=True)


def write_model(folder: Path) -> None:
    """The weights that the run left, as `folder/model`, which appears at once and whole. Without the card, which tells
    times: every build gives the same folder, and runs that began with it go on with any."""
    with tempfile.TemporaryDirectory(prefix=".model-", dir=folder) as work:
        exported = Path(work) / "model"
        export(Ledger.open(open_store(str(folder)), RUN), exported)
        (exported / CARD).unlink()
        exported.rename(folder / "model")
