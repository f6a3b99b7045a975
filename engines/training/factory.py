"""Construction of the training engine that a configuration selects."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cairn.configs.engines import reader_of
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.configs.view import view
from cairn.engines.training.base import TrainingEngine
from cairn.engines.training.megatron.options import PERMITTED


def problems(training: TrainingConfig, model_path: str) -> Iterator[str]:
    """Yield messages on what the engine that `training.engine` names cannot do with a model; creates no engine."""
    if training.engine == "megatron":
        from cairn.engines.training.megatron.options import problems as megatron_problems

        yield from megatron_problems(training, model_path)


def permitted() -> Mapping[str, frozenset[str]]:
    """Return the options that a store may set in mappings of an engine's own, by the mapping's name."""
    return {"training.megatron": PERMITTED}


def make_engine(
    model: ModelConfig, training: TrainingConfig, algorithm: AlgorithmConfig, *, device: str = "cpu", **options: Any
) -> TrainingEngine:
    """Create one rank of the engine in this process.

    Arguments are those of `cairn.engines.training.base.TrainingEngine`. Raises BadModel.
    """
    reader = reader_of("training", algorithm=algorithm)
    training, algorithm = view(training, reader, "training"), view(algorithm, reader, "algorithm")
    if training.engine == "megatron":
        from cairn.engines.training.megatron.backend import backend_for

        backend_for(torch.device(device))  # prepares megatron-core before anything imports it
        from cairn.engines.training.megatron.engine import MegatronEngine

        return MegatronEngine(model, training, algorithm, device=device, **options)
    from cairn.engines.training.torch.engine import TorchEngine

    return TorchEngine(model, training, algorithm, device=device, **options)
