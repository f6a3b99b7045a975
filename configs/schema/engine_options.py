"""What an evaluation's engine is given."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from cairn.configs.schema.base import Section
from cairn.configs.schema.rollout import RolloutConfig


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

    def rollout(self, stop: tuple[str, ...] = ()) -> RolloutConfig:
        """As an engine is made from it. `stop`: strings that end responses."""
        return RolloutConfig(
            num_rollout=1,
            rollout_batch_size=1,
            rollout_max_response_len=1,
            engine=self.engine,
            dtype=self.dtype,
            sglang=self.sglang,
            num_gpus_per_engine=self.num_gpus,
            num_threads=self.num_threads,
            rollout_stop=stop,
            timeout=7 * 24 * 3600,  # of all that a benchmark asks at once
        )
