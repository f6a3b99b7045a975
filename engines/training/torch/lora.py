"""LoRA by peft: low-rank adapters next to frozen weights (Hu et al., "LoRA", 2022, equation 3).

An adapted layer computes W x + s B A x, with s = lora_alpha / r. Training never merges anything into the model. The
exported weights are W + s B A, computed one by one during the export.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from transformers import PreTrainedModel

from cairn.configs.schema.training import LoraConfig
from cairn.engines.models.configs import ties_embeddings
from cairn.engines.training.freezing import preparation_problems
from cairn.engines.training.sharding import add_to_part, whole
from cairn.engines.types.errors import BadModel

ADAPTER = "default"
"""peft's name for the only adapter of a layer."""
SEED = 0
"""Seed of the adapters' first values: every rank and every start of an engine draws the same."""


def lora_problems(lora: LoraConfig, path: str) -> list[str]:
    """Return messages on targets that the model in a folder does not have or that cannot be adapted.

    Loads no weights.
    """
    return preparation_problems(path, lambda model: add_adapters(model, lora))


def add_adapters(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Freeze a model's weights and add float32 adapters to the target layers, in place.

    B begins at zero, so the model computes the same as before.

    Raises:
        BadModel: a target does not exist, or its adapter could not be merged.
    """
    _check_targets(model, lora)
    targets = lora.target_modules
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        use_rslora=lora.use_rslora,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        peft.inject_adapter_in_model(config, model, ADAPTER)
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and not isinstance(layer.base_layer, torch.nn.Linear):
            raise BadModel(
                f"training.lora.target_modules matches {name}, which is not a linear layer and cannot be adapted here "
                "(nor can experts in one tensor): use linear layers, such as [q_proj, k_proj, v_proj, o_proj]"
            )
    for name, parameter in model.named_parameters():
        if _is_adapter(name):
            parameter.data = parameter.data.float()
    model.eval()


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Disable the adapters within the context, for passes without gradients."""
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        for name, parameter in model.named_parameters():
            if _is_adapter(name):
                parameter.requires_grad_(True)  # FSDP looks but once, at the first forward pass
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_parameters(model: PreTrainedModel, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, or this rank's shards of them, under the names of the model without adapters.

    Adapted weights are W + s B A, float32 on `device`. All ranks take part; the model does not change.
    """
    adapted = {
        f"{name}.base_layer.weight": layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)
    }
    for name, parameter in model.named_parameters():
        if _is_adapter(name):
            continue
        tensor = parameter.detach()
        if name in adapted:
            tensor = add_to_part(tensor.to(device).float(), _delta(adapted[name], device))
        yield _without_adapter(name), tensor


def base_parameters(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same parameters before anything is merged into them."""
    named = model.named_parameters()
    return ((_without_adapter(name), parameter) for name, parameter in named if not _is_adapter(name))


def save_adapters(model: PreTrainedModel, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write adapters so that peft's `PeftModel.from_pretrained` loads them onto the model they were trained on.

    Args:
        weights: the adapters' parameters, whole, on the CPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.peft_config[ADAPTER].save_pretrained(folder)
    named = {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": weight for name, weight in weights.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _check_targets(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Raise BadModel for a target without a linear layer, or one that is tied to the input embedding.

    peft accepts a list if one of several targets exists, and adapts half of a tied pair of weights.
    """
    if isinstance(lora.target_modules, str):
        return
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for target in lora.target_modules:
        matched = [module for name, module in linear.items() if f".{name}".endswith(f".{target}")]
        if not matched:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise BadModel(
                f"training.lora.target_modules has {target}, which matches no linear layer of the model; it has {known}"
            )
        if model.get_output_embeddings() in matched and ties_embeddings(model.config):
            raise BadModel(
                f"training.lora.target_modules has {target}, whose weight is also the model's input embedding: an "
                "adapter of the one would change the other; leave it out"
            )


def _delta(layer: Any, device: torch.device) -> torch.Tensor:
    """Return s B A of an adapted layer, whole on every rank: [out, in] float32."""
    a, b = (whole(factor[ADAPTER].weight.detach().to(device)) for factor in (layer.lora_A, layer.lora_B))
    return b @ a * layer.scaling[ADAPTER]


def _without_adapter(name: str) -> str:
    return name.replace(".base_layer.", ".")


def _is_adapter(name: str) -> bool:
    return not set(LoraLayer.adapter_layer_names).isdisjoint(name.split("."))
