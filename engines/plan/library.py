"""Tensors and sizes of any model that the library knows: of a config, for which the library makes the model without
memory for its weights, and of a folder."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from cairn.engines.models.configs import ARCHITECTURE_OF, require_no_code, sees_images
from cairn.engines.models.folders import (
    KNOWN_TYPES,
    check_model_folder,
    open_weights,
    parameter_names,
    with_own_rotation,
)
from cairn.engines.plan.rates import ModelSize, size_of
from cairn.engines.plan.tensors import Model, Tensor
from cairn.engines.types.errors import BadModel


def model_of(config: PretrainedConfig) -> Model:
    """Return the causal language model of a config, with its tensors.

    Raises BadModel where the library cannot make it, or where it has parts that the plan does not include.
    """
    if sees_images(config):
        raise BadModel(f"a {config.model_type} reads images, whose memory and time the plan does not include")
    text = config.get_text_config()
    if getattr(text, "compress_rates", None):
        raise BadModel(
            f"a {text.model_type} has hyper-connections and compressed attention, whose memory and time the plan does "
            "not include"
        )
    try:
        with torch.device("meta"):
            made: Any = AutoModelForCausalLM.from_config(text)
    except (ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError, RuntimeError) as error:
        raise BadModel(f"no {text.model_type} model can be made of the config: {error}") from error
    return Model(text, tuple(Tensor(name, tuple(value.shape)) for name, value in made.named_parameters()))


def config_of(stored: dict[str, Any]) -> PretrainedConfig:
    """Return the contents of a config.json as the library's config object. Raises BadModel."""
    kind = stored.get("model_type")
    if not isinstance(kind, str):
        raise BadModel("the config has no model_type, which says its architecture")
    require_no_code(stored, "the config", KNOWN_TYPES)
    known_as = ARCHITECTURE_OF.get(kind, kind)
    if known_as not in CONFIG_MAPPING:
        raise BadModel(f"the config is of a {kind} model, which the library does not know")
    own = {name: value for name, value in stored.items() if name not in ("model_type", "auto_map", "architectures")}
    try:
        return with_own_rotation(CONFIG_MAPPING[known_as].from_dict(own))
    except Exception as error:  # the library reports a broken config with whatever its many config classes raise
        raise BadModel(f"the config of a {kind} model cannot be read: {error}") from error


@cache
def folder_size(path: str) -> ModelSize:
    """Return the size of the model in a folder, from its config and the headers of its weight files. Raises
    BadModel."""
    config, names = check_model_folder(path).get_text_config(), parameter_names(path)
    weights = open_weights(Path(path)).items()
    return size_of(config, {name: weight.get_shape() for name, weight in weights if name in names})
