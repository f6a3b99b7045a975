"""Shapes of the published models, from the library: `python -m tests.published_shapes` writes the file that
`cairn.engines.plan.published` reads and describes."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from transformers import PretrainedConfig

from cairn.configs.catalogue import published_names
from cairn.engines.plan.published import LAYERS, SHAPES, made_model
from cairn.engines.plan.tensors import Model, Tensor


def line(name: str, model: Model) -> str:
    """Return the line of a model that the library made."""
    values = {"name": name, "config": described(model.config), "tensors": shared(model.tensors)}
    return json.dumps(values) + "\n"


def described(config: Any) -> dict[str, Any]:
    """Return the entries of the library's config that its own class has, under all names. Those that every class has,
    such as labels and the library's version, tell nothing of the architecture."""
    common = PretrainedConfig().to_dict().keys()
    own = {name: value for name, value in config.to_dict().items() if name not in common}
    aliases = {alias: own[name] for alias, name in config.attribute_map.items() if name in own}
    return {"model_type": config.model_type, **own, **aliases}


def shared(tensors: Sequence[Tensor]) -> dict[str, list[int]]:
    """Return shapes by names whose layers are ranges; `_expanded` restores the order of the tensors."""
    entries: dict[str, list[int]] = {}
    for inside, group in groupby(tensors, lambda tensor: tensor.layer is not None):
        if not inside:
            entries |= {tensor.name: list(tensor.shape) for tensor in group}
            continue
        layers: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        order: list[tuple[str, tuple[int, ...]]] = []
        for layer, members in groupby(group, lambda tensor: tensor.layer):
            place = 0
            for tensor in members:
                key = (LAYERS.sub("*", tensor.name), tensor.shape)
                place = order.index(key) + 1 if key in layers else place + 1
                if key not in layers:
                    order.insert(place - 1, key)
                layers.setdefault(key, []).append(int(layer or 0))
        for name, shape in order:
            entries[name.replace("*", as_ranges(layers[name, shape]))] = list(shape)
    return entries


def as_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges, such as 0-2,4."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, ends)) for ends in ranges)


if __name__ == "__main__":
    SHAPES.write_text("".join(line(name, made_model(name)) for name in published_names()), "utf-8")
