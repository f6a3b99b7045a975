"""An engine of an evaluation's own, in this process: no run's, and no cluster's."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from cairn.configs.schema.engine_options import EngineOptions
from cairn.engines.episodes.records import Recorded
from cairn.engines.episodes.samples import SampleEngine
from cairn.engines.episodes.user_code import GenerateFunction
from cairn.engines.errors import BadModel
from cairn.engines.models import check_model_folder, context_length
from cairn.engines.rollout.factory import kind_of, make_engine
from cairn.engines.rollout.plan import Place
from cairn.engines.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types import SamplingParams
from cairn.tasks.evaluation import Engines

CALL_TIMEOUT = 120.0
"""Seconds that an engine may take to answer anything but a request to generate."""
START_TIMEOUT = 600.0
"""Seconds until it must serve."""


class OwnEngine:
    """An engine in this process, as tasks know one."""

    def __init__(self, made: Any) -> None:
        self.name = "the engine of this evaluation"
        self.made = made
        self._samples = SampleEngine(made.open, made.abort)

    def generate_samples(
        self, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction
    ) -> Iterator[list[GeneratedSample] | Recorded]:
        """See `cairn.engines.episodes.samples.SampleEngine`."""
        return self._samples.generate(samples, params, function)

    def acknowledge(self, number: int) -> None:
        """The same."""
        self._samples.acknowledge(number)

    def abort(self) -> None:
        """End what is being generated."""
        self._samples.abort()


@contextmanager
def own_engine(folder: str, options: EngineOptions, stop: tuple[str, ...] = ()) -> Iterator[Engines]:
    """An engine that serves a model folder. `stop`: strings that end what it is asked for. Raises BadModel, EngineDied
    and EngineTimeout."""
    config = options.rollout(stop)
    plans = kind_of(options.engine).plan(config, False).engines
    if len(plans) != 1 or plans[0].nnodes != 1:
        raise BadModel("an evaluation has one engine on one machine: leave out what asks for several")
    with tempfile.TemporaryDirectory(prefix="cairn-eval-") as logs:
        log = Path(logs) / "engine.log"
        transformers_logging.set_verbosity_error()  # errors say in one sentence what the library reports
        made = make_engine(folder, config, plans[0], Place(), log, START_TIMEOUT, CALL_TIMEOUT)
        try:
            yield Engines([OwnEngine(made)], made.environment)
        finally:
            close: Callable[[], None] | None = getattr(made, "close", None)
            if close is not None:
                close()


def require_room(folder: str, longest_prompt: int) -> None:
    """Raise BadModel unless a benchmark's longest prompt, in tokens, leaves room for a response."""
    context = context_length(check_model_folder(folder))
    if longest_prompt >= context:
        raise BadModel(
            f"the benchmark's longest prompt has {longest_prompt} tokens, and the model in {folder} a context of "
            f"{context}: take a model with a longer one, or fewer rows with --data FILE@[A:B]"
        )
