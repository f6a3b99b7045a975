"""What a training engine says of the options that are its own, before there is one. Nothing here loads PyTorch, but for
an engine that is asked about a model."""

from collections.abc import Iterator, Mapping

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.megatron.permitted import PERMITTED


def problems(training: TrainingConfig, model_path: str) -> Iterator[str]:
    """Sentences on what the engine that `training.engine` names cannot do with a model."""
    if training.engine == "megatron":
        from cairn.engines.training.megatron.options import problems as megatron_problems

        yield from megatron_problems(training, model_path)


def permitted() -> Mapping[str, frozenset[str]]:
    """What a store may set of options that are mappings of an engine's own, by their names."""
    return {"training.megatron": PERMITTED}
