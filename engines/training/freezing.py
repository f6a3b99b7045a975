"""Parameters of a Hugging Face model that stay as they are."""

import re
from collections.abc import Collection
from difflib import get_close_matches

import torch
from transformers import PreTrainedModel

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.models.folders import check_model_folder, model_class
from cairn.engines.types.errors import BadModel

# Which parameters of the actor are trained: those that `only_train_params_name_list` matches, or all but those that
# `freeze_params_name_list` does. Names are Hugging Face's.
#
# The others are frozen: they have no gradient, no moments and no part in the gradient norm, and no weight decay touches
# them. They are part of the state all the same, and of the weights that others get.


def frozen_names(names: Collection[str], training: TrainingConfig) -> frozenset[str]:
    """Those of a whole model's parameters, by their names, that stay as they are.

    Raises:
        BadModel: a pattern is in no name, or nothing is left to train.
    """
    only, freeze = training.only_train_params_name_list, training.freeze_params_name_list
    option = "training.only_train_params_name_list" if only else "training.freeze_params_name_list"
    matched: set[str] = set()
    for pattern in only or freeze:
        found = {name for name in names if re.search(pattern, name)}
        if not found:
            near = get_close_matches(pattern.replace("\\", ""), sorted(names), n=3, cutoff=0.0)
            raise BadModel(
                f"{option} has {pattern!r}, which is in the name of no parameter of the model: there are "
                f"{', '.join(near)} and others; a tied output layer goes by the name of the input embedding"
            )
        matched |= found
    frozen = frozenset(names) - matched if only else frozenset(matched)
    if len(frozen) == len(names):
        raise BadModel(f"{option} leaves no parameter to train: name fewer")
    return frozen


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
        BadModel: see `cairn.engines.training.freezing.frozen_names`.
    """
    parameters = dict(model.named_parameters())
    for name in frozen_names(parameters, training):
        parameters[name].requires_grad_(False)
