"""Loading of a model over ranks, each of which holds its own shards only.

`load_outline` makes the model without the values of its parameters. After FSDP2 has divided it, `fill` reads each
rank's shards from the weight files.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from cairn.engines.models.folders import check_model_folder, load_causal_lm, model_class, open_weights
from cairn.engines.models.published import Part, is_exact, keep_conversions, published_parts, saved_buffers
from cairn.engines.models.quantized import Slice
from cairn.engines.training.sharding import local_part


def load_outline(path: str | Path, dtype: torch.dtype, *, needs_head: bool = True) -> PreTrainedModel:
    """Return a causal language model in evaluation mode, whose parameters are on the device `meta`, without values.

    A model is loaded whole, as `load_causal_lm` does, where one of its tensors is not made of consecutive weights of
    the files, or where the library keeps some weights in another number format than `dtype`.

    Args:
        needs_head: False where the caller replaces `lm_head`, which may then be missing.

    Raises:
        BadModel: as `load_causal_lm`.
    """
    folder, config = Path(path), check_model_folder(path)
    kind = model_class(config)._model_mapping[type(config)]
    exact = {*(kind._keep_in_fp32_modules or ()), *(kind._keep_in_fp32_modules_strict or ())}
    if dtype != torch.float32 and not all(map(is_exact, exact)):
        return load_causal_lm(path, dtype, needs_head=needs_head)
    with _without_values():
        model: PreTrainedModel = kind._from_config(config, dtype=dtype)
    keep_conversions(model)
    weights, buffers = open_weights(folder), dict(saved_buffers(model))
    parts = published_parts(model, (*model.named_parameters(), *buffers.items()))
    wanted = [part for name, own in parts.items() if needs_head or name != "lm_head.weight" for part in own]
    if not all(part.name in weights and list(weights[part.name].get_shape()) == [*part.shape] for part in wanted):
        return load_causal_lm(path, dtype, needs_head=needs_head)
    for name, buffer in buffers.items():
        values = torch.empty_like(buffer, dtype=torch.float32 if is_exact(name) else buffer.dtype)
        _read(values.view(-1), 0, parts[name], weights)
        buffer.data = values
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval()


@torch.no_grad()
def fill(model: PreTrainedModel, path: str | Path, device: torch.device) -> None:
    """Read the values of this rank's shards that have none yet, onto the device."""
    empty = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
    if not empty:
        return
    weights, parts = open_weights(Path(path)), published_parts(model, empty.items())
    filled: dict[int, torch.nn.Parameter] = {}
    for name, parameter in empty.items():
        shard = torch.empty_like(parameter, device=device)
        local, offset = local_part(shard)
        _read(local.view(-1), offset, parts[name], weights)
        filled[id(parameter)] = torch.nn.Parameter(shard, parameter.requires_grad)
    for module in model.modules():  # tied parameters belong to several
        for name, value in module._parameters.items():
            if value is not None and id(value) in filled:
                module._parameters[name] = filled[id(value)]


def _read(values: torch.Tensor, offset: int, parts: tuple[Part, ...], weights: Mapping[str, Slice]) -> None:
    """Fill elements of a flattened tensor, from `offset` on, from the weights that it consists of."""
    for part in parts:
        first, last = (min(max(place - offset, 0), len(values)) for place in (part.start, part.end))
        if first == last:
            continue
        start, end = offset + first - part.start, offset + last - part.start
        width = part.shape[1:].numel()
        if part.shape and not start % width and not end % width:
            found = weights[part.name][start // width : end // width].reshape(-1)
        else:
            found = weights[part.name][...].reshape(-1)[start:end]
        values[first:last] = found


@contextmanager
def _without_values() -> Iterator[None]:
    """Put parameters of modules that are made within on the device `meta`; buffers keep their values."""
    modules: Any = torch.nn.Module
    register = modules.register_parameter

    def register_on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # a tied one is on it
            parameter = torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    modules.register_parameter = register_on_meta
    try:
        yield
    finally:
        modules.register_parameter = register
