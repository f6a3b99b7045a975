"""Frozen parameters of a Hugging Face model, in the tensors that Megatron makes of them."""

from collections.abc import Collection

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.models.folders import check_model_folder
from cairn.engines.models.published import published_parts
from cairn.engines.training.freezing import frozen_names
from cairn.engines.training.megatron.families import family_of
from cairn.engines.training.megatron.families.base import Family
from cairn.engines.types.errors import BadModel


def freezing_problems(training: TrainingConfig, path: str) -> list[str]:
    """Return messages on names that the model in a folder does not have, or that Megatron cannot freeze separately.

    Loads no weights.
    """
    try:
        config = check_model_folder(path).get_text_config()
        frozen_tensors(family_of(config), config, training)
    except BadModel as error:
        return [str(error)]
    return []


def frozen_tensors(family: Family, config: PretrainedConfig, training: TrainingConfig) -> frozenset[str]:
    """Return the frozen tensors of a model's weight files, by their names in these files, and those without gradients.

    Names are matched on the whole model as the library builds it. So both engines freeze the same parameters, and every
    rank computes the same names by itself, whatever part of the model it holds.

    Raises:
        BadModel: only some of the tensors that Megatron holds in one are frozen; or see
            `cairn.engines.training.freezing.frozen_names`.
    """
    untrained = family.untrained(config)
    if not (training.only_train_params_name_list or training.freeze_params_name_list):
        return untrained
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = [name for name, _ in model.named_parameters()]
    frozen = frozen_names(names, training)
    _check_whole(family, config.num_hidden_layers, names, frozen)
    parts = published_parts(model, model.named_parameters())
    return untrained.union(part.name for name in frozen for part in parts[name])


def _check_whole(family: Family, layers: int, names: Collection[str], frozen: Collection[str]) -> None:
    for together in family.merged_tensors(layers):
        parts = [name for name in together if name in names]
        stay = [name for name in parts if name in frozen]
        if stay and stay != parts:
            go = [name for name in parts if name not in frozen]
            raise BadModel(
                f"training.only_train_params_name_list or freeze_params_name_list freezes {' and '.join(stay)} but not "
                f"{' and '.join(go)}, and Megatron holds them in one tensor: freeze all of them or none, or set "
                "training.engine to torch"
            )
