"""Model folders in the Hugging Face format: checks before anything starts, and loading.

Errors say what to do. Weights are read from safetensors only (no pickle), and no code of the folder is run. Quantised
weights are dequantised while they are read (see `cairn.engines.models.quantized`), so callers of this module never see
them quantised.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import isroutine
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)
from transformers.utils import logging as transformers_logging

from cairn.configs.catalogue import published_repository
from cairn.engines.models.configs import (
    ARCHITECTURE_OF,
    LANGUAGE_MODEL_OF,
    require_no_code,
    sees_images,
    ties_embeddings,
)
from cairn.engines.models.published import is_exact, is_mtp, published_parts, saved_buffers
from cairn.engines.models.quantized import Slice, open_tensors, quantization_of
from cairn.engines.types.errors import BadModel
from cairn.storage.store.canonical import from_json

_ADAPTER = "adapter_config.json"
"""An adapter next to the weights names another model, which the library would load in place of the weights."""


def require_no_adapter(folder: Path) -> None:
    """Raise BadModel where the folder holds an adapter next to the weights."""
    if (folder / _ADAPTER).exists():
        raise BadModel(
            f"Model folder {folder} holds an adapter ({_ADAPTER}) of another model: merge it into the weights, or take "
            "it out."
        )


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_CLASSIFIER = "ForSequenceClassification"


KNOWN_TYPES = frozenset({*CONFIG_MAPPING, *ARCHITECTURE_OF, *LANGUAGE_MODEL_OF})
"""Model types that need no code of a folder."""


def check_model_folder(path: str | Path) -> PretrainedConfig:
    """Read a model folder's config and the headers of its weight files, without loading weights.

    Raises:
        BadModel: the folder or a file in it is missing, broken, or not of a causal language model.
    """

    def require_causal(config: PretrainedConfig) -> None:
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not sees_images(config):
            raise BadModel(f"Model type {config.model_type} in {path} is not a causal language model.")

    return _check_folder(Path(path), require_causal)


def check_reward_model_folder(path: str | Path) -> PretrainedConfig:
    """Check the folder of a reward model as `check_model_folder` does, and return its config.

    A reward model is a sequence classifier with one label, whose value is the score.

    Raises:
        BadModel: as `check_model_folder`, or the model is no classifier, or it has more than one label.
    """

    def require_one_label(config: PretrainedConfig) -> None:
        architecture = next(iter(config.architectures or ()), config.model_type)
        if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or not architecture.endswith(_CLASSIFIER):
            raise BadModel(
                f"Model folder {path} holds a {architecture}, which is not a reward model: use one with a "
                f"{_CLASSIFIER} of one label."
            )
        if config.num_labels != 1:
            raise BadModel(
                f"The classifier in {path} has {config.num_labels} labels, but the score is the value of one: use a "
                "reward model with one label."
            )

    return _check_folder(Path(path), require_one_label)


def _check_folder(folder: Path, require: Callable[[PretrainedConfig], None]) -> PretrainedConfig:
    if not folder.is_dir():
        repository = published_repository(folder.name)
        way = f"hf download {repository} --local-dir {folder}" if repository else "set the path of one that does"
        raise BadModel(f"Model folder {folder} does not exist: {way}.")
    require_no_adapter(folder)
    config = _read_config(folder)
    require(config)
    for file in weight_files(folder):
        if not file.is_file():
            raise BadModel(f"Model folder {folder} lacks its weight file {file.name}: copy the folder again.")
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise BadModel(f"Weight file {file} is broken ({error}): copy the folder again.") from error
    open_weights(folder)
    return config


def model_class(config: PretrainedConfig) -> Any:
    """Return the library's class that makes the language model of a config, with or without images."""
    return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM


def load_causal_lm(
    path: str | Path, dtype: torch.dtype, device: str = "cpu", *, needs_head: bool = True
) -> PreTrainedModel:
    """Load a causal language model in evaluation mode and cast its weights to `dtype`.

    Args:
        needs_head: False where the caller replaces `lm_head`, which may then be missing.

    Raises:
        BadModel: as `check_model_folder`, or the weights do not fit the config.
    """
    config = check_model_folder(path)
    return _load(model_class(config), path, config, dtype, device, needs_head)


def load_reward_model(path: str | Path, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """Load a sequence classifier with one label in evaluation mode and cast its weights to `dtype`.

    Raises:
        BadModel: as `check_reward_model_folder`, or the weights do not fit the config.
    """
    return _load(AutoModelForSequenceClassification, path, check_reward_model_folder(path), dtype, device)


def _load(
    kind: Any, path: str | Path, config: PretrainedConfig, dtype: torch.dtype, device: str, needs_head: bool = True
) -> PreTrainedModel:
    with _quiet():
        try:
            options: dict[str, Any] = {
                "config": config,
                "dtype": dtype,
                "local_files_only": True,
                "ignore_mismatched_sizes": True,  # reported below, all of them at once
                "output_loading_info": True,
            }
            if quantization_of(Path(path)) is None and not _weights_prefix(Path(path)):
                loaded: Any = kind.from_pretrained(path, use_safetensors=True, trust_remote_code=False, **options)
            else:
                loaded = _from_tensors(kind, Path(path), options)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, SafetensorError) as error:
            raise BadModel(f"Model folder {path} cannot be loaded: {_first_line(error)}") from error
    model, info = loaded
    if info["mismatched_keys"]:
        name, shape, expected = sorted(info["mismatched_keys"])[0]
        raise BadModel(
            f"Weight {name} in {path} has shape {tuple(shape)} where config.json requires {tuple(expected)}: weights "
            "and config.json are of different models."
        )
    missing = [name for name in info["missing_keys"] if needs_head or name != "lm_head.weight"]
    if missing:
        raise BadModel(
            f"Model folder {path} lacks the weights {_some(sorted(missing))}: copy the folder again, "
            "or correct its config.json."
        )
    for parameter in model.parameters():  # of which the library keeps some in float32 that it does not compute with
        parameter.data = parameter.data.to(dtype)
    _restore_exact(model, Path(path))
    return cast(PreTrainedModel, model.to(device).eval())


def _from_tensors(kind: Any, folder: Path, options: dict[str, Any]) -> Any:
    """Load a model from `open_weights`. Quantised weights are dequantised when the library reads them."""
    loaded = kind._model_mapping[type(options["config"])].from_pretrained(
        None, state_dict=open_weights(folder), **options
    )
    if (folder / "generation_config.json").is_file():
        loaded[0].generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return loaded


def _restore_exact(model: PreTrainedModel, folder: Path) -> None:
    """Reload the buffers that the library rounded and that must stay exact (see `published.is_exact`)."""
    rounded = [(name, buffer) for name, buffer in saved_buffers(model) if is_exact(name)]
    if all(buffer.dtype == torch.float32 for _, buffer in rounded):
        return
    parts, weights = published_parts(model, rounded), open_weights(folder)
    for name, buffer in rounded:
        (part,) = parts[name]
        buffer.data = weights[part.name][...].float()


def open_weights(folder: Path) -> dict[str, Slice]:
    """Return every weight of a folder by its name, as a `Slice` of which parts can be read.

    Of types in `LANGUAGE_MODEL_OF`, those of the language model, by the names that they have in a folder of it alone.

    Raises:
        BadModel: the weights are quantised in an unsupported way, or parts of quantised weights are missing.
    """
    weights, prefix = open_tensors(weight_files(folder), quantization_of(folder)), _weights_prefix(folder)
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _weights_prefix(folder: Path) -> str:
    """Return the prefix of the names of all weights that are read."""
    return LANGUAGE_MODEL_OF.get(from_json((folder / "config.json").read_text()).get("model_type", ""), "")


def parameter_names(path: str | Path) -> frozenset[str]:
    """Return the names of a model's parameters as its weight files have them; tied parameters count once.

    Layers that predict several tokens ahead (`cairn.engines.models.published.is_mtp`) are left out, because no engine
    trains them.

    Raises:
        BadModel: the folder cannot be used.
    """
    folder = Path(path)
    config = _read_config(folder)
    layers = config.get_text_config().num_hidden_layers
    names = {name for name in open_weights(folder) if not is_mtp(name, layers)}
    return frozenset(names - {"lm_head.weight"} if ties_embeddings(config) else names)


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the model's end tokens: those of its generation config and of its config together."""
    return _end_tokens(model.generation_config, model.config.get_text_config())


def end_tokens(folder: str | Path) -> frozenset[int]:
    """Return the end tokens of a model folder as `eos_token_ids` does, without loading weights. Raises BadModel."""
    sources: list[Any] = [check_model_folder(folder).get_text_config()]
    if (file := Path(folder) / "generation_config.json").is_file():
        # The library's parser may raise any exception for a broken file.
        try:
            sources.append(GenerationConfig.from_pretrained(folder, local_files_only=True))
        except Exception as error:
            raise BadModel(f"{file} cannot be read: {_first_line(error)}") from error
    return _end_tokens(*sources)


def _end_tokens(*sources: Any) -> frozenset[int]:
    ids: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(ids)


def _read_config(folder: Path) -> PretrainedConfig:
    if not (folder / "config.json").is_file():
        raise BadModel(f"Model folder {folder} has no config.json: use a folder in Hugging Face format.")
    try:
        config = read_config(folder)
    except BadModel:
        raise
    # The library's many config classes may raise any exception for a broken config.
    except Exception as error:
        raise BadModel(f"{folder / 'config.json'} cannot be read: {_first_line(error)}") from error
    return config


def read_config(folder: Path) -> PretrainedConfig:
    """Return the config of a model folder, without its quantization_config.

    Types of `ARCHITECTURE_OF` are read as the type whose architecture they have, and those of `LANGUAGE_MODEL_OF` as
    their language model. Raises BadModel where the config names code, and whatever the library raises.
    """
    stored, _ = PretrainedConfig.get_config_dict(folder, local_files_only=True)
    require_no_code(stored, folder / "config.json", KNOWN_TYPES)
    whole = stored.get("model_type") not in LANGUAGE_MODEL_OF
    if not whole:
        stored = stored["text_config"]
    kind = stored.get("model_type", "")
    if whole and kind not in ARCHITECTURE_OF:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    else:
        config = AutoConfig.for_model(
            ARCHITECTURE_OF.get(kind, kind),
            **{name: value for name, value in stored.items() if name not in _CLASS_KEYS},
        )
    for part in _parts(config, folder / "config.json"):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return with_own_rotation(config)


def _parts(config: PretrainedConfig, file: Path) -> Iterator[PretrainedConfig]:
    """Yield a config and that of its language model. Raises BadModel where an entry of the file stands in the place of
    a method, or of a language model's config that the class does not have."""
    yield _with_its_methods(config, file)
    text: Any = config.get_text_config()
    if not isinstance(text, PretrainedConfig):
        raise BadModel(f"{file} has a text_config, which {config.model_type} models do not have: remove it.")
    yield _with_its_methods(text, file)


def _with_its_methods(config: PretrainedConfig, file: Path) -> PretrainedConfig:
    for name in vars(config):
        if isroutine(getattr(type(config), name, None)):
            raise BadModel(f"{file} has an entry {name}, which is a method of the library's config: remove it.")
    return config


def with_own_rotation(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config, changed where the library would rotate other parts of a head than the model's own code."""
    if config.model_type == "minimax_m2" and (width := getattr(config, "rotary_dim", None)) is not None:
        # The model's own code and SGLang rotate this part of a head; the library by default rotates the whole head.
        config.rope_parameters.setdefault("partial_rotary_factor", width / config.head_dim)
    return config


_CLASS_KEYS = ("model_type", "architectures", "auto_map")
"""Keys of a config that refer to a class that the library does not have."""


def save_config(config: PretrainedConfig, source: Path, folder: Path) -> None:
    """Write the config.json of a model that was loaded from `source`.

    Keys of the config.json in `source` that the library drops are added, because other programs read them: SGLang reads
    Qwen3-Next's `full_attention_interval`.
    """
    config.save_pretrained(folder)
    file = folder / "config.json"
    written, published = from_json(file.read_text()), from_json((source / "config.json").read_text())
    if published.get("model_type") != config.model_type:  # the part that is a language model
        published = published.get("text_config", {})
    lacking = {name: value for name, value in published.items() if name not in written and name not in _REPLACED_KEYS}
    if lacking:
        file.write_text(json.dumps(written | lacking, indent=2, sort_keys=True) + "\n")


_REPLACED_KEYS = ("architectures", "auto_map", "quantization_config", "rope_scaling", "rope_theta", "torch_dtype")
"""Keys that the library writes in another way, or that are not true of the weights as written."""


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder. Raises BadModel."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise BadModel(f"Model folder {folder} has neither {WEIGHTS} nor {INDEX}: save its weights as safetensors.")
    try:
        weight_map = from_json((folder / INDEX).read_text())["weight_map"]
        return [folder / name for name in sorted(set(weight_map.values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadModel(f"{folder / INDEX} is not an index of weight files: copy the folder again.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's progress bars and load reports within. Errors report problems in one sentence."""
    verbosity = transformers_logging.get_verbosity()
    progress_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if progress_bar:
            transformers_logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__


def _some(names: list[str]) -> str:
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")
