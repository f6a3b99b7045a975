"""The training engine that a configuration asks for."""

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

# What a training engine says of the options that are its own, before there is one. Nothing here loads PyTorch, but for
# an engine that is asked about a model.


def problems(training: TrainingConfig, model_path: str) -> Iterator[str]:
    """Sentences on what the engine that `training.engine` names cannot do with a model."""
    if training.engine == "megatron":
        from cairn.engines.training.megatron.options import problems as megatron_problems

        yield from megatron_problems(training, model_path)


def permitted() -> Mapping[str, frozenset[str]]:
    """What a store may set of options that are mappings of an engine's own, by their names."""
    return {"training.megatron": PERMITTED}


def make_engine(
    model: ModelConfig, training: TrainingConfig, algorithm: AlgorithmConfig, *, device: str = "cpu", **options: Any
) -> TrainingEngine:
    """Make one rank of it in this process; arguments as in `cairn.engines.training.base.TrainingEngine`. Raises
    BadModel."""
    reader = reader_of("training", algorithm=algorithm)
    training, algorithm = view(training, reader, "training"), view(algorithm, reader, "algorithm")
    if training.engine == "megatron":
        from cairn.engines.training.megatron.backend import backend_for

        backend_for(torch.device(device))  # prepares megatron-core before anything imports it
        from cairn.engines.training.megatron.engine import MegatronEngine

        return MegatronEngine(model, training, algorithm, device=device, **options)
    from cairn.engines.training.torch.engine import TorchEngine

    return TorchEngine(model, training, algorithm, device=device, **options)
