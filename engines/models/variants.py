"""Checks that two folders hold one model, whose numbers may be rounded in different ways."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cairn.engines.models.folders import check_model_folder, end_tokens, open_weights, parameter_names
from cairn.engines.types.errors import BadModel

_WITHOUT_EFFECT = (
    *("architectures", "auto_map", "dtype", "torch_dtype", "quantization_config", "transformers_version"),
    *("_name_or_path", "tokenizer_class", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
    *("attention_dropout", "initializer_range", "max_window_layers", "output_router_logits", "router_aux_loss_coef"),
)
"""Entries of config.json that change no logit, or that say how weights are stored."""


def variant_problems(option: str, path: str, trained: str) -> Iterator[str]:
    """Yield a sentence where a folder is not another rounding of the trained model: by its config, its end tokens, or
    the names and shapes of its weights. Reads no weights. Problems of one folder alone are left to others."""
    try:
        ours, theirs = _entries(trained), _entries(path)
        if differing := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
            name = differing[0]
            yield (
                f"{option}: the config.json in {path} has {name}={theirs.get(name)!r}, and that in {trained} has "
                f"{ours.get(name)!r}: use a folder of the model that is trained"
            )
            return
        ends, of_other = (sorted(end_tokens(folder)) for folder in (trained, path))
        if ends != of_other:
            yield (
                f"{option}: responses end at tokens {of_other} by the configs in {path}, and at {ends} by those in "
                f"{trained}: make eos_token_id in generation_config.json the same"
            )
            return
        mine, others = _shapes(trained), _shapes(path)
    except (BadModel, OSError, ValueError):
        return
    if differing := sorted(name for name in mine.keys() | others.keys() if mine.get(name) != others.get(name)):
        name = differing[0]
        found, expected = (f"has shape {one[name]}" if name in one else "is missing" for one in (others, mine))
        yield (
            f"{option}: the weight {name} {found} in {path}, and {expected} in {trained}: use a folder of the model "
            "that is trained"
        )


def _entries(folder: str) -> dict[str, Any]:
    return dict(_flat(check_model_folder(folder).to_dict(), ""))


def _flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if name in _WITHOUT_EFFECT:
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights that an update sends, dequantised."""
    names = parameter_names(folder)
    return {name: tuple(one.get_shape()) for name, one in open_weights(Path(folder)).items() if name in names}
