"""Checks of a training engine's own options before there is an engine. Imports PyTorch only to look at a model."""

from collections.abc import Iterator, Mapping
from typing import Any

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.megatron.permitted import PERMITTED


def problems(training: TrainingConfig, model_path: str) -> Iterator[str]:
    """Yield messages on what the engine that `training.engine` names cannot do with a model; creates no engine."""
    if training.engine == "megatron":
        from cairn.engines.training.megatron.options import problems as megatron_problems

        yield from megatron_problems(training, model_path)
    elif training.packs_rows:
        from cairn.engines.training.torch.attention import packing_problems

        yield from packing_problems(model_path, training.context_parallel_size)


def config_problems(training: TrainingConfig, config: Any) -> Iterator[str]:
    """Yield messages on the layout that show without a model's folder.

    Args:
        config: the model's config, or that of its language part.
    """
    if training.engine == "megatron":
        from cairn.engines.training.megatron.options import model_problems

        yield from model_problems(training, config.get_text_config())
    elif training.packs_rows:
        from cairn.engines.training.torch.attention import model_problems as packing_problems

        yield from packing_problems(config, training.context_parallel_size)


def permitted() -> Mapping[str, frozenset[str]]:
    """Return the options that a store may set in mappings of an engine's own, by the mapping's name."""
    return {"training.megatron": PERMITTED}
