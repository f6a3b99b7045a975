"""Code and kernels that a model's config.json may name, at whatever depth: refused by a sentence.

| key | refused |
|---|---|
| `auto_map` | where the library has no class of its own for the `model_type` beside it, and would run the folder's |
| `…_implementation`, of attention and experts | all but PyTorch's: the library fetches others |
| `quantization_config` | but in the config itself and in `text_config`, where `cairn.engines.quantized` reads it |
| `use_pretrained_backbone`, `use_timm_backbone`, `use_kernels` | where set: the library fetches what is named |

An adapter beside the weights (`adapter_config.json`) names another model, which the library would load in their place.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from cairn.engines.errors import BadModel

_IMPLEMENTATION = re.compile(r"_?\w*_implementation(_internal)?")
_OWN = frozenset({None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm"})
"""What the library computes with PyTorch alone. FlashAttention it fetches where it is not installed."""
_FETCHING = frozenset({"use_pretrained_backbone", "use_timm_backbone", "use_kernels"})
_ADAPTER = "adapter_config.json"


def require_no_code(stored: Mapping[str, Any], file: str | Path, known: Collection[str]) -> None:
    """Raise BadModel where a config names code. `known`: model types that need none of a folder's."""
    for problem in _problems(dict(stored), known, ""):
        raise BadModel(f"{file} {problem}: take it out, no code is fetched or run that a model names.")


def require_no_adapter(folder: Path) -> None:
    """Raise BadModel where an adapter lies beside the weights."""
    if (folder / _ADAPTER).exists():
        raise BadModel(
            f"Model folder {folder} holds an adapter ({_ADAPTER}) of another model: merge it into the weights, or take "
            "it out."
        )


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
                if not isinstance(kernel, str | None) or kernel not in _OWN:
                    yield f"takes {name} from {kernel}"
        elif key == "quantization_config" and inner and place not in ("", "text_config."):
            yield f"quantises a part in a way that is not read ({name})"
        elif key in _FETCHING and inner:
            yield f"has parts of the model fetched ({name})"
        yield from _problems(inner, known, f"{name}.")
