"""Parameters of a Hugging Face model that stay as they are."""

import torch
from transformers import PreTrainedModel

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.errors import BadModel
from cairn.engines.models import check_model_folder, model_class
from cairn.engines.training.frozen import frozen_names


def freezing_problems(training: TrainingConfig, path: str) -> list[str]:
    """Sentences on names that the model in a folder does not have; loads no weights."""
    try:
        config = check_model_folder(path)
        with torch.device("meta"):
            freeze(model_class(config).from_config(config), training)
    except BadModel as error:
        return [str(error)]
    return []


def freeze(model: PreTrainedModel, training: TrainingConfig) -> None:
    """Freeze in place, before the model is sharded, what the two lists of names say. Tied parameters have one name.

    Raises:
        BadModel: see `cairn.engines.training.frozen.frozen_names`.
    """
    parameters = dict(model.named_parameters())
    for name in frozen_names(parameters, training):
        parameters[name].requires_grad_(False)
