from pathlib import Path

import pytest

from cairn.flows.iteration import iteration
from examples.quickstart import build as builder
from examples.quickstart.warm_start import RUN, config
from tests.tiny_run import DirectSteps, tiny_context


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """A folder to stand in, with what `make tiny` builds but for a warm start of twenty steps instead of 300."""
    folder: Path = tmp_path_factory.mktemp("root")
    assert builder.build(folder / builder.FOLDER, steps=20, train=warm_start)
    return folder


def warm_start(folder: Path, steps: int) -> None:
    """As `examples.quickstart.warm_start.warm_start`, with the engine in this process."""
    recipe = config(folder, steps)
    with tiny_context(str(folder), recipe, RUN) as (run, _):
        for index in range(recipe.rollout.num_rollout):
            iteration(run, DirectSteps(run), index)
