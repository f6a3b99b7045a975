"""Published models: configs with the library's defaults filled in, and shapes of all tensors.

They are stored in `shapes.jsonl`, a line for each name of `cairn.configs.catalogue`: a plan of one needs neither
PyTorch nor the library, which take seconds to import. Layers with the same tensor share an entry:
`model.layers.0-2,4.mlp.…`. After a change of the published configs or of the library,
`python -m cairn.engines.plan.published` writes the file anew.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cairn.configs.catalogue import published_config, published_names
from cairn.engines.plan.tensors import Model, Tensor

SHAPES = Path(__file__).with_name("shapes.jsonl")

_LAYERS = re.compile(r"(?<=\blayers\.)[\d,-]+(?=\.)")


class StoredConfig(SimpleNamespace):
    """Config of a language model, with the names of the library."""

    model_type: str

    def get_text_config(self) -> "StoredConfig":
        return self


def published_model(name: str) -> Model:
    """Return the published model `name`, from its line or, where there is none yet, from the library. Raises BadModel
    where the library cannot make it."""
    with SHAPES.open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(_start(name)):
                values = json.loads(line)
                return Model(StoredConfig(**values["config"]), tuple(_expanded(values["tensors"])))
    return made_model(name)


def made_model(name: str) -> Model:
    """Return the published model `name`, made by the library. Raises BadModel."""
    from cairn.engines.plan.library import config_of, model_of

    stored = published_config(name)
    assert stored is not None, name
    return model_of(config_of(stored))


def _start(name: str) -> str:
    return f'{{"name": {json.dumps(name)}, '


def _line(name: str, model: Model) -> str:
    """Return the line of a model that the library made."""
    values = {"name": name, "config": _described(model.config), "tensors": _shared(model.tensors)}
    return json.dumps(values) + "\n"


def _described(config: Any) -> dict[str, Any]:
    """Return the entries of the library's config that its own class has, under all names. Those that every class has,
    such as labels and the library's version, tell nothing of the architecture."""
    from transformers import PretrainedConfig

    common = PretrainedConfig().to_dict().keys()
    own = {name: value for name, value in config.to_dict().items() if name not in common}
    aliases = {alias: own[name] for alias, name in config.attribute_map.items() if name in own}
    return {"model_type": config.model_type, **own, **aliases}


def _shared(tensors: Sequence[Tensor]) -> dict[str, list[int]]:
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
                key = (_LAYERS.sub("*", tensor.name), tensor.shape)
                place = order.index(key) + 1 if key in layers else place + 1
                if key not in layers:
                    order.insert(place - 1, key)
                layers.setdefault(key, []).append(int(layer or 0))
        for name, shape in order:
            entries[name.replace("*", _as_ranges(layers[name, shape]))] = list(shape)
    return entries


def _expanded(entries: Mapping[str, Sequence[int]]) -> Iterator[Tensor]:
    for inside, group in groupby(entries.items(), lambda entry: _LAYERS.search(entry[0]) is not None):
        if not inside:
            yield from (Tensor(name, tuple(shape)) for name, shape in group)
            continue
        by_layer: dict[int, list[Tensor]] = {}
        for name, shape in group:
            for layer in _of_ranges(_LAYERS.search(name)[0]):  # type: ignore[index]
                by_layer.setdefault(layer, []).append(Tensor(_LAYERS.sub(str(layer), name), tuple(shape)))
        for layer in sorted(by_layer):
            yield from by_layer[layer]


def _as_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges, such as 0-2,4."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, ends)) for ends in ranges)


def _of_ranges(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    SHAPES.write_text("".join(_line(name, made_model(name)) for name in published_names()), "utf-8")
