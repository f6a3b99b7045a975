"""What tests of the agents in `examples/` share: a policy that follows a script, and an agent's recipe from its warm
start on."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cairn.configs.loader import load
from cairn.engines.types.trajectories import SampleRequest, Segment, Trajectory
from cairn.flows.driver.validation import data_problems, setup_problems
from cairn.flows.iteration import iteration
from cairn.tasks.durable.context import RunContext
from examples.quickstart.model import build_tokenizer
from examples.quickstart.warm_start import BATCH, write_model
from tests.examples.conftest import warm_start
from tests.tiny_run import DirectSteps, tiny_context

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Scripted:
    """A context whose policy says what it was told to, and whose tools are one function of their arguments."""

    says: Sequence[str]
    tool: Callable[[Mapping[str, Any]], Any]
    tokenizer: Any = field(default_factory=lambda: build_tokenizer(["nothing"]))
    asked: list[list[int]] = field(default_factory=list)
    """What each call of the policy goes on from."""
    called: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    """Tools and their arguments."""

    async def sample(self, ids: Sequence[int]) -> Segment:
        self.asked.append(list(ids))
        said = self.tokenizer.encode(f"{self.says[len(self.asked) - 1]}<|im_end|>", add_special_tokens=False)
        return Segment(np.array(said, np.int32), np.ones(len(said), np.uint8), str(len(self.asked) - 1))

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        self.called.append((tool, arguments))
        return self.tool(arguments)

    async def play(self, generate: Callable[[Any, SampleRequest], Awaitable[Trajectory]], prompt: str) -> list[str]:
        """The segments of an episode as text: of the policy and of the world in turn, each after all before it."""
        ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        segments = (await generate(self, SampleRequest(0, 0, ids, 0))).segments
        for turn, asked in enumerate(self.asked):
            assert asked == [*ids, *(id for segment in segments[: 2 * turn] for id in segment.ids)]
        assert [segment.call is None for segment in segments] == [turn % 2 == 1 for turn in range(len(segments))]
        return [self.tokenizer.decode(segment.ids) for segment in segments]


@contextmanager
def trained(
    recipe: Path, builder: ModuleType, folder: Path, steps: int, overrides: Sequence[str] = ()
) -> Iterator[RunContext]:
    """The recipe, run to its end in `folder` with one engine, after a warm start of so many steps."""
    (folder / "examples").symlink_to(ROOT / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        builder.prepare(builder.FOLDER, 0, BATCH * steps)
        warm_start(builder.FOLDER, steps)
        write_model(builder.FOLDER)
        config = load(recipe, ["rollout.num_engines=1", "tracking.tensorboard_dir=null", *overrides])
        assert setup_problems(config) + data_problems(config) == []
        with tiny_context(str(folder), config) as (run, _):
            for index in range(config.rollout.num_rollout):
                iteration(run, DirectSteps(run), index)
            yield run
