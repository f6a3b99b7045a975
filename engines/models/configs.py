"""What a model's config.json says: which code it may name, and lengths and kinds that the library's class and a stored
description (`cairn.engines.plan.published`) both have.

This module needs neither PyTorch nor the library, whose imports take seconds.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from cairn.engines.types.errors import BadModel

ARCHITECTURE_OF = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Published model types without a class in the library, each with the type whose architecture it has.

Further parts of these models, such as layers that predict several tokens ahead, are not read.
"""

LANGUAGE_MODEL_OF = {"kimi_k25": "language_model."}
"""Published model types that read images too, and of which only the language model is read, each with the prefix of its
weights. The library has a class for the language model alone, whose config they have under `text_config`."""

SEES_IMAGES = frozenset({"qwen2_5_vl"})
"""Model types that read images as well as text; see `cairn.engines.models.vision`."""


class Config(Protocol):
    """Config of a model, with the names and defaults of the library: its `PretrainedConfig`, or a stored one."""

    @property
    def model_type(self) -> str: ...

    def __getattribute__(self, name: str, /) -> Any: ...


def sees_images(config: Config) -> bool:
    """Whether a model reads images as well as text."""
    return config.model_type in SEES_IMAGES


def ties_embeddings(config: Config) -> bool:
    """Whether a model's output layer shares the weight of its input embedding."""
    of_text = getattr(config.get_text_config(), "tie_word_embeddings", None)
    return bool(config.tie_word_embeddings if of_text is None else of_text)


def context_length(config: Config) -> int:
    """Return the length of the longest sequence, prompt and response together, in tokens.

    Raises:
        BadModel: the config does not say it.
    """
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise BadModel(f"The config of model type {config.model_type} has no max_position_embeddings: add it.")
    return length


# Code and kernels that a model's config.json may name, at any depth, and that are rejected with an error.
#
# | key | rejected |
# |---|---|
# | `auto_map` | where the library has no class for the `model_type` next to it, and would run the folder's code |
# | `…_implementation`, of attention and experts | all but PyTorch's: the library downloads others |
# | `quantization_config` | elsewhere than in the config itself and in `text_config` |
# | `use_pretrained_backbone`, `use_timm_backbone`, `use_kernels` | where set: the library downloads what they name |


_IMPLEMENTATION = re.compile(r"_?\w*_implementation(_internal)?")
_PYTORCH_IMPLEMENTATIONS = frozenset({None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm"})
"""Implementations that use PyTorch alone. The library downloads FlashAttention where it is not installed."""
_DOWNLOAD_KEYS = frozenset({"use_pretrained_backbone", "use_timm_backbone", "use_kernels"})


def require_no_code(stored: Mapping[str, Any], file: str | Path, known: Collection[str]) -> None:
    """Raise BadModel where a config names code. `known`: model types that need no code of a folder."""
    for problem in _problems(dict(stored), known, ""):
        raise BadModel(f"{file} {problem}: remove it, no code that a model names is fetched or run.")


def _problems(value: Any, known: Collection[str], place: str) -> Iterator[str]:
    if isinstance(value, list):
        value = {str(index): item for index, item in enumerate(value)}
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        name = f"{place}{key}"
        if key == "auto_map" and inner and value.get("model_type") not in known:
            yield f"names code of its own ({name}) for model type {value.get('model_type')}"
        elif _IMPLEMENTATION.fullmatch(key):
            for kernel in inner.values() if isinstance(inner, dict) else [inner]:
                if not isinstance(kernel, str | None) or kernel not in _PYTORCH_IMPLEMENTATIONS:
                    yield f"takes {name} from {kernel}"
        elif key == "quantization_config" and inner and place not in ("", "text_config."):
            yield f"quantises a part in an unsupported way ({name})"
        elif key in _DOWNLOAD_KEYS and inner:
            yield f"fetches parts of the model ({name})"
        yield from _problems(inner, known, f"{name}.")
