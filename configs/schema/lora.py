"""Low-rank adapters."""

from typing import Literal

from pydantic import Field, field_validator

from cairn.configs.schema.base import Section


class LoraConfig(Section):
    """Train low-rank adapters in place of all weights; names as in peft's `LoraConfig`. Engine torch alone."""

    r: int = Field(0, ge=0)
    """Rank of the adapters; 0 trains all weights and no adapter."""

    lora_alpha: int = Field(8, ge=1)
    """An adapter counts lora_alpha / r times."""

    use_rslora: bool = False
    """An adapter counts lora_alpha / sqrt(r) times instead."""

    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """The linear layers that get an adapter, by the last part of their names in the model, or all of it: `[q_proj,
    v_proj]`. `all-linear` takes all but the output layer."""

    @field_validator("target_modules")
    @classmethod
    def _some(cls, names: str | list[str]) -> str | list[str]:
        if not names:
            raise ValueError("is empty: leave it out for all-linear, or name the layers that get an adapter")
        return names
