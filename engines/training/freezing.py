"""Frozen parameters of a Hugging Face model."""

import re
from collections.abc import Callable, Collection
from difflib import get_close_matches

import torch
from transformers import PreTrainedModel

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.models.folders import check_model_folder, model_class
from cairn.engines.types.errors import BadModel


def frozen_names(names: Collection[str], training: TrainingConfig) -> frozenset[str]:
    """Return the Hugging Face names of the frozen parameters, among all names of a whole model.

    The actor's trained parameters are those that `only_train_params_name_list` matches, or all except those that
    `freeze_params_name_list` matches. The others are frozen: they have no gradient, no moments, no part in the gradient
    norm and no weight decay. They are still part of the state and of the exported weights.

    Raises:
        BadModel: a pattern matches no name, or no parameter is left to train.
    """
    only, freeze = training.only_train_params_name_list, training.freeze_params_name_list
    option = "training.only_train_params_name_list" if only else "training.freeze_params_name_list"
    matched: set[str] = set()
    for pattern in only or freeze:
        matching = {name for name in names if re.search(pattern, name)}
        if not matching:
            near = get_close_matches(pattern.replace("\\", ""), sorted(names), n=3, cutoff=0.0)
            raise BadModel(
                f"{option} has {pattern!r}, which matches no parameter of the model: it has {', '.join(near)} and "
                "others; a tied output layer has the name of the input embedding"
            )
        matched |= matching
    frozen = frozenset(names) - matched if only else frozenset(matched)
    if len(frozen) == len(names):
        raise BadModel(f"{option} leaves no parameter to train: list fewer")
    return frozen


def freezing_problems(training: TrainingConfig, path: str) -> list[str]:
    """Return messages on names that the model in a folder does not have; loads no weights."""
    return preparation_problems(path, lambda model: freeze(model, training))


def preparation_problems(path: str, prepare: Callable[[PreTrainedModel], None]) -> list[str]:
    """Return the message of the BadModel that preparing the model in a folder raises, if any; loads no weights."""
    try:
        config = check_model_folder(path)
        with torch.device("meta"):
            prepare(model_class(config).from_config(config))
    except BadModel as error:
        return [str(error)]
    return []


def freeze(model: PreTrainedModel, training: TrainingConfig) -> None:
    """Freeze parameters in place according to the two lists of names. Call this before the model is sharded.

    Tied parameters have one name.

    Raises:
        BadModel: see `cairn.engines.training.freezing.frozen_names`.
    """
    parameters = dict(model.named_parameters())
    for name in frozen_names(parameters, training):
        parameters[name].requires_grad_(False)
