"""Rollout servers of several kinds, as slime's `--sglang-config` describes them."""

from typing import Any, Literal

from pydantic import Field, model_validator

from cairn.configs.schema.base import Section


class ServerGroup(Section):
    """Servers of one kind."""

    worker_type: Literal["regular", "prefill", "decode"] = "regular"
    """What its servers do: everything, or only one side of prefill/decode disaggregation, which needs both."""

    num_engines: int | None = Field(None, ge=1)
    """Engines of the group; null takes `num_gpus` / `num_gpus_per_engine`."""

    num_gpus: int | None = Field(None, ge=1)
    """GPUs of the group, in place of `num_engines`."""

    num_gpus_per_engine: float | None = Field(None, ge=0)
    """GPUs of each of its engines; null takes `rollout.num_gpus_per_engine`."""

    overrides: dict[str, Any] = Field(default_factory=dict)
    """Options of the group's servers, by SGLang's names; they go before those of `rollout.sglang`."""

    @model_validator(mode="after")
    def _its_size_is_given_once(self) -> "ServerGroup":
        if (self.num_engines is None) == (self.num_gpus is None):
            raise ValueError("a server group has either num_engines or num_gpus: give one of them")
        return self

    def count(self, num_gpus_per_engine: float) -> int:
        """Engines of the group, each of so many GPUs unless the group says otherwise. Raises ValueError."""
        each = self.num_gpus_per_engine if self.num_gpus_per_engine is not None else num_gpus_per_engine
        if self.num_gpus is None:
            assert self.num_engines is not None
            return self.num_engines
        if not each or self.num_gpus % each:
            raise ValueError(
                f"a server group of {self.num_gpus} GPUs cannot be cut into engines of {each:g} each: change num_gpus "
                "or num_gpus_per_engine"
            )
        return int(self.num_gpus / each)
