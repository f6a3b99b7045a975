"""An engine of an evaluation's own, in this process: no run's, and no cluster's."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from transformers.utils import logging as transformers_logging

from cairn.configs.schema.base import Section
from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.errors import BadModel
from cairn.engines.models import check_model_folder, context_length
from cairn.engines.rollout.factory import kind_of, make_engine
from cairn.engines.rollout.plan import Place
from cairn.engines.rollout.samples import SampleEngine
from cairn.engines.rollout.user_code import GenerateFunction
from cairn.engines.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types import SamplingParams
from cairn.tasks.evaluation import Engines

CALL_TIMEOUT = 120.0
"""Seconds that an engine may take to answer anything but a request to generate."""
START_TIMEOUT = 600.0
"""Seconds until it must serve."""


class EngineOptions(Section):
    """What weights are evaluated with. Names and defaults as in `rollout`."""

    engine: Literal["transformers", "sglang"] = "transformers"
    """Kind of the rollout engine."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and computation."""

    sglang: dict[str, Any] = Field(default_factory=dict)
    """Options of SGLang's server, as in `rollout.sglang`."""

    num_gpus: float = Field(0, ge=0)
    """GPUs that it takes; 0 computes on the CPU."""

    num_threads: int = Field(1, ge=1)
    """CPU threads. With one, samples of `transformers` do not depend on how they are batched."""

    @classmethod
    def of_run(cls, rollout: RolloutConfig, given: Mapping[str, Any]) -> "EngineOptions":
        """A run's, but for those that are given; another engine has none of the run's own options."""
        own: dict[str, Any] = {
            "engine": rollout.engine,
            "dtype": rollout.dtype,
            "num_gpus": rollout.num_gpus_per_engine,
            "num_threads": rollout.num_threads,
        }
        if rollout.engine == "sglang" == given.get("engine", rollout.engine):
            own["sglang"] = rollout.sglang
        return cls.model_validate({**own, **given})

    def settings(self) -> dict[str, Any]:
        """What a result's key has of it: what decides which bits come out, wherever they are computed."""
        return {"engine": self.engine, "dtype": self.dtype, **({"sglang": self.sglang} if self.sglang else {})}

    def rollout(self) -> RolloutConfig:
        """As an engine is made from it."""
        return RolloutConfig(
            num_rollout=1,
            rollout_batch_size=1,
            rollout_max_response_len=1,
            engine=self.engine,
            dtype=self.dtype,
            sglang=self.sglang,
            num_gpus_per_engine=self.num_gpus,
            num_threads=self.num_threads,
            timeout=7 * 24 * 3600,  # of all that a benchmark asks at once
        )


class OwnEngine:
    """An engine in this process, as tasks know one."""

    def __init__(self, made: Any) -> None:
        self.name = "the engine of this evaluation"
        self.made = made
        self._samples = SampleEngine(made.open, made.abort)

    def generate_samples(
        self, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction
    ) -> Iterator[list[GeneratedSample]]:
        """See `cairn.engines.rollout.samples.SampleEngine`."""
        return self._samples.generate(samples, params, function)

    def abort(self) -> None:
        """End what is being generated."""
        self._samples.abort()


@contextmanager
def own_engine(folder: str, options: EngineOptions) -> Iterator[Engines]:
    """An engine that serves a model folder. Raises BadModel, EngineDied and EngineTimeout."""
    config = options.rollout()
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
