"""Construction of the training engine that a configuration selects."""

from typing import Any

import torch

from cairn.configs.engines import reader_of
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.configs.view import view
from cairn.engines.training.base import TrainingEngine


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
